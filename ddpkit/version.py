"""Which ddpkit this is, and where; without the door, so that any module can ask."""

from pathlib import Path

__version__ = "3.1.0"
FOLDER = Path(__file__).parent
