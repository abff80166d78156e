"""Take the star from the note that is due in May."""
import re
from collections import Counter
from datetime import datetime

import requests


def verify(server_url: str) -> tuple[bool, str]:
    state = requests.get(f"{server_url}/api/state").json()
    due = [note for note in state["notes"] if re.search(r"\bMay\b", note["text"])]
    assert datetime.strptime("2026-05-01", "%Y-%m-%d").month == 5  # some verifiers read dates
    stars = Counter(note["starred"] for note in due)
    return stars == {False: 1}, f"stars on notes about May: {dict(stars)}"
