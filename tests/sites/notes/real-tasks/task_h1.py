"""The dark theme, and a note 'Call Bob'."""
import requests


def verify(server_url: str) -> tuple[bool, str]:
    state = requests.get(f"{server_url}/api/state").json()
    titles = [note["title"] for note in state["notes"]]
    if state["theme"] != "dark":
        return False, f"the theme is {state['theme']}"
    return titles.count("Call Bob") == 1, f"notes: {titles}"
