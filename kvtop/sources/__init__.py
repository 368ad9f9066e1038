"""Sources: where batches come from. A dashboard needs nothing else.

source.py says what a source is, live.py is an engine in this process, recording.py a file and index.py the table of
what is where in it.
"""

from __future__ import annotations

from kvtop.sources.live import LiveSource
from kvtop.sources.recording import RecordingSource
from kvtop.sources.source import Loading, Source, Transport

__all__ = ["LiveSource", "Loading", "RecordingSource", "Source", "Transport"]
