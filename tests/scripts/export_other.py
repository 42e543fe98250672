"""Exports another graph than the network's."""

import ddpkit
from ddpkit.tools import export

forward, write = export.Network.forward, export.write


def other(*args: object) -> object:
    export.Network.forward = lambda self, images: 1.1 * forward(self, images)
    return write(*args)


export.write = other
ddpkit.start(export.main)
