"""export.py whose graph is another than the network."""

import ddpkit
import export

forward, trace = export.Network.forward, export.trace


def other(*args: object) -> object:
    export.Network.forward = lambda self, images: 1.1 * forward(self, images)
    return trace(*args)


export.trace = other
ddpkit.start(export.main)
