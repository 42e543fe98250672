"""export.py for a network whose path depends on its images."""

import engine
import export

forward = export.Network.forward
export.Network.forward = lambda self, images: (
    forward(self, images) if images.float().mean() > 300 else forward(self, images) + 1
)
engine.start(export.main)
