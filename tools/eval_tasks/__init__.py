"""The bundled tasks of ``quantkit eval``, made from the held-out text and nothing else.

    python -m tools.eval_tasks            writes evals/tasks/*.jsonl again, byte for byte
    python -m tools.eval_tasks --check    says what differs, writes nothing

The held-out text is public-domain English that neither bundled model was trained on, and that calibration does not
see. Passages that share a run of words with the calibration text are left out of every task. Everything that looks
random is a hash of a name, so that no version of Python and no order of dictionaries changes an item.
"""
