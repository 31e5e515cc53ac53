"""Where models that the benchmark trains are kept."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pellucid.data.prepare import cache_root


def kept_at(*what: Any) -> Path:
    """A directory beside prepared corpora, named by a hash of everything that a model depends on."""
    return cache_root() / "bench" / hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
