"""Exports a network whose path depends on its images."""

import ddpkit
from ddpkit.tools import export

forward = export.Network.forward
export.Network.forward = lambda self, images: (
    forward(self, images) if images.float().mean() > 300 else forward(self, images) + 1
)
ddpkit.start(export.main)
