"""What was drawn."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def drawn(monkeypatch) -> list:
    """The axes of every figure that is closed from now on."""
    axes, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: (axes.extend(figure.axes), close(figure)))
    return axes
