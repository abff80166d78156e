"""Claims about worlds/miniwob.py beside BrowserGym's own MiniWoB++ (beside.py says what is set equal).

Where the two differ is listed with its reason. A new difference fails, and so does a listed one that is gone.
"""
import beside
import pytest

# ---- where they differ, and why ----------------------------------------------------------------------------

LIST = "a list box shows all its options here, a part of them there"
CLOCK = "it shows what time does: it passes with the actions alone here, it is the real one there"
CENTRE = "a click lands on a part of the element without a line of its own here, on its centre there"
LOADS = "its icon is another image under the mouse, and no image while that one loads: the click misses there"
DATES = "a date or a time may be typed as on an American keyboard here, and as the DOM has it there"
LINK = "a link to # changes the address, which BrowserGym takes for another page: it ends, and pays nothing"
PAGES = {"click-scroll-list": LIST, "stock-market": CLOCK, "terminal": CLOCK}
REWARDS = {"click-collapsible": CENTRE, "click-collapsible-nodelay": CENTRE, "click-tab": CENTRE,
           "navigate-tree": CENTRE, "enter-date": DATES, "enter-time": DATES, "search-engine": LINK,
           "social-media": LOADS}


def check(played: dict, same, listed: dict[str, str], show) -> None:
    """The tasks that differ are the listed ones. show: what a failure says of a trajectory."""
    found = {task: [seen for seen in trajectories if not same(seen)] for task, trajectories in played.items()}
    new = [f"{task}, seed {seen['seed']}: {show(seen)}" for task, differing in found.items()
           if task not in listed for seen in differing]
    gone = [f"{task} does not differ any more ({listed[task]}): take it out of the list"
            for task, differing in found.items() if task in listed and not differing]
    if new + gone:
        pytest.fail("\n".join([*new, *gone]), pytrace=False)


def test_every_task_of_browsergym_was_played(played):
    """Guards against a page that both refuse, and that so has no difference."""
    lines = lambda seen: "\t[] " in seen["pages"][0][0]  # some pages have none to act on
    none = [task for task, trajectories in played.items()
            if not any(seen["actions"] or not lines(seen) for seen in trajectories)]
    assert not none


def test_the_goal_is_the_same(played):
    """Guards against another episode behind the same seed, and against a goal that lacks what BrowserGym's
    says."""
    check(played, beside.same_goal, {}, lambda seen: " | ".join(seen["goals"]))


def test_the_first_page_reads_the_same(played):
    """Guards against another episode behind the same seed, against what an episode before left on the page,
    and against elements that only one of the two can name."""
    def lines(seen):
        here, there = (page.split("\n") for page in seen["pages"][0])
        return "\n".join([f"only here: {line}" for line in here if line not in there]
                         + [f"only there: {line}" for line in there if line not in here])
    check(played, beside.same_page, PAGES, lines)


def test_the_same_actions_bring_the_same_reward_and_the_same_end(played):
    """Guards against events that a page's scripts take for others than a mouse's and a keyboard's, and
    against timers that fire in one of the two."""
    check(played, beside.same_end, REWARDS,
          lambda seen: f"{seen['actions']} {seen['raw']} {seen['ended']} {seen['errors']} {seen['lost']}")


def test_a_success_is_the_whole_reward_here_and_any_reward_there(played):
    """Guards against a page's own reward that is read wrongly. Where a page pays a part, BrowserGym counts a
    success and we do not (NOTES 6.5)."""
    for seen in sum(played.values(), []):
        for (ours, theirs), (here, there), (ended, _) in zip(seen["rewards"], seen["raw"], seen["ended"]):
            assert (ours, theirs) == (float(ended and here == 1), float((there or 0) > 0)), seen
