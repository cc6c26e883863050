"""What an evaluation found, told to people and to machines; computes no statistics.

One ``Report`` (candidates against one baseline, each with its gate's verdict or none) in many forms, each in the
module of its name:

    report       ``Report``, ``Judged``, ``Outcome``
    document     ``document``: what ``quantkit eval --json`` prints; its schema is document.schema.json
    junit        ``junit_xml``: for a pipeline's test view
    annotations  ``annotations``: GitHub workflow commands
    content      ``content``: the sections of text and tables that the next three show
    markdown     ``markdown``, ``append_step_summary``: for GitHub, and for terminals without rich
    html         ``html``: one self-contained page, with plots (plots, curves, svg)
    attach       ``attach``: all of it into an artifact's attachments

quantkit/cli/show_eval.py is the terminal's. Everything here is plain Python: it runs where results are read, not
where they are made.
"""
