"""The front door: OpenAI's endpoints, metrics and a page for people, over any ``Service``.

``app.create_app`` puts it together. Read in the order in which a request goes through: ``hosts``, ``keys``,
``gate``, ``body`` (before a route sees it); ``schemas`` (what is accepted); ``template``, ``tokens`` (its prompt);
``sampling``; ``answers`` (the engine's outputs, several at a time); ``chat`` and ``completions`` (shapes of the
reply); ``sse``.

Why so strict: a field that a server accepts and ignores gives wrong results without a word. So schemas are closed,
and what would have to be ignored is refused by name. Left out: images, audio, tool calls parsed out of the text,
beam search.
"""
