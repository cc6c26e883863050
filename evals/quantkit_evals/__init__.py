"""What a conversion does to a model, with statistics.

torch, transformers and lm-eval (extra ``eval``) are imported inside the functions that need them, so that this
package imports cheaply. ``python -m quantkit_evals.demo`` is what ``make demo`` runs.

    evaluation   ``quantkit eval`` as a library call; choice says of whom, session in which order
    candidates   our engine, transformers, endpoints; harness runs lm-eval on them
    report       what was found, told to people and machines
    text         bundled text as token blocks, the same for every model with the same tokenizer
    dequantized  BF16 copy of a checkpoint or view, made by our own kernels, that transformers can load
    models       transformers models from a directory on disk, with the checks that a silent load would skip
    perplexity   perplexity over held-out blocks with its standard error
    fidelity     KL divergence, top-1 agreement and flips of one model against another
    tasks        what candidates are asked: bundled tasks, files of one's own, names that lm-eval knows; suites
    run_file     results of a candidate on disk, with a record of every item
    compare      two results side by side, with intervals and tests (paired); gate judges them
    artifact     the two views of an artifact against each other, with the noise floor (``quantkit fidelity``)
"""
