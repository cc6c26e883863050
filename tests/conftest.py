"""The tests do not depend on the settings of whoever runs them.

Variables of the Hub client and of quantkit are removed before anything reads them: huggingface_hub takes them
once, at import, so a fixture would come too late. Unbuffered output would hide what happens to a buffer at exit.
What stays is QUANTKIT_PEER_PYTHON: it changes nothing of quantkit, and says where tests find llm-compressor.

Triton decides when it is first imported whether kernels run in its interpreter, and transformers imports it: so
the interpreter is set for all tests, before either. On a GPU, ``make gpu-check`` runs the kernels themselves.
"""

from __future__ import annotations

import os

for _name in [
    name
    for name in os.environ
    if (name.startswith(("HF_", "QUANTKIT_")) and name != "QUANTKIT_PEER_PYTHON")
    or name in ("NO_COLOR", "PYTHONUNBUFFERED")
]:
    del os.environ[_name]

os.environ["TRITON_INTERPRET"] = "1"
