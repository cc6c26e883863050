"""Load for any OpenAI-compatible server, and what it measures: ``quantkit bench serve``.

Read in this order: ``prompts``, ``sse``, ``client`` (one request), ``record`` (its times), ``drive`` (many),
``result`` (figures), ``plot``, ``bench`` (the sweep). It knows servers by their HTTP only, so that ours and others
are measured by the same code. Definitions are those of vLLM's ``vllm bench serve``, so that figures compare.
"""
