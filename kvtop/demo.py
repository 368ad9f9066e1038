"""What the file of a demo imports. The room behind it may move; these names stay."""

from kvtop.play.demo import Demo, Script, Stage, page, runs

__all__ = ["Demo", "Script", "Stage", "page", "runs"]
