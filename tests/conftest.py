"""The tests do not depend on the settings of whoever runs them.

Variables of the Hub client and of quantkit are removed before anything reads them: huggingface_hub takes them
once, at import, so a fixture would come too late. Unbuffered output would hide what happens to a buffer at exit.
What stays is QUANTKIT_PEER_PYTHON: it changes nothing of quantkit, and says where tests find llm-compressor.
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
