"""What was drawn, and printed."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def drawn(monkeypatch) -> list:
    """The axes of every figure that is closed from now on."""
    axes, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: (axes.extend(figure.axes), close(figure)))
    return axes


def table(report: str, title: str) -> dict[str, list[str]]:
    """The rows of the table below a title, by their first column."""
    below = report.split(f"### {title}", 1)[1].split("###")[0]
    rows = [[text.strip() for text in line.strip("|").split("|")]
            for line in below.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in rows[2:]}
