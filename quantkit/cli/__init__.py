"""The command line: thin commands over ``quantkit.api``; stdout is data, stderr is talk.

``main`` holds the command group, ``boundary`` is the one place where errors become exit codes, ``console``
the one place that prints (and the only module that imports rich), ``options`` the shared options,
``commands`` one file per command, ``show`` how results are laid out for people. Nothing here imports
torch, numpy, pydantic or huggingface_hub before a command needs it, so ``quantkit --help`` answers at once.
"""
