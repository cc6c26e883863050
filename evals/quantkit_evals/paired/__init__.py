"""Paired statistics: what is known of a difference between two candidates that answered the same items.

Pairing is what makes small differences visible: both candidates get most items right or wrong together, and only
the rest speaks. Items of one document depend on each other, so that everything is computed over clusters.

    clusters    sums per cluster, the ratio estimator with its cluster-robust standard error, test of no difference
    bootstrap   BCa intervals over resampled clusters
    skewed      intervals of divergences, whose tails a bootstrap has hardly seen
    counted     what changed, in numbers of independent items
    few         wider intervals where there are few clusters or few changes, which a bootstrap is too sure of
    mcnemar     exact and mid-p tests of flips, and their power
    holm        p values of several metrics, adjusted
    decision    verdicts against limits, and how many items would decide
"""
