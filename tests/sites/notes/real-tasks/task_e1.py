"""Star the note on the holiday: that one has a star now, and no other changed."""
import requests


def verify(server_url: str) -> tuple[bool, str]:
    response = requests.get(f"{server_url}/api/state")
    if response.status_code != 200:
        return False, f"no state: HTTP {response.status_code}"
    stars = [note["starred"] for note in response.json()["notes"]]
    return stars == [False, True, True], f"stars: {stars}"
