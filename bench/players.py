"""Scripted players: one for each page of MiniWoB++ that can be won by its text and our actions alone.

    def enter_text(goal, page):                    # the goal, and the first page
        page = yield write(page, quoted(goal)[0])  # an action; what is sent back is the next page
        yield click(page, "button", "Submit")

A player does what the goal says. It sees what an agent sees (Obs.goal, Obs.page) and gives what an agent
gives (data.parse_action). It knows its page as somebody does who has played it: that of an email's two icons
the first is the trash, that a list has to be closed before a button can be pressed. It knows no seed. One
that does not find a line gives up (Lost), and has not won.

bench/pages.py counts what players win. PLAYERS, at the end, says who plays which page.
"""

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import a11y
import data
from data import Action

Player = Callable[[str, "Page"], Generator[str, "Page", None]]


class Lost(Exception):
    """A line that the player looks for is not there."""


# ---- what a player reads -----------------------------------------------------------------------------------

class Page:
    """A page as lines. `said` is a line's name, or else the text right below it."""

    def __init__(self, text: str):
        self.nodes = a11y.parse(text)
        for k, node in enumerate(self.nodes):  # the parts of a date field all have its id: a11y reads none
            if not node.role and (shown := re.match(r"\[(\w+)\] ", node.text)):
                [node] = a11y.parse(node.text[shown.end():])
                self.nodes[k] = replace(node, bid=shown[1])

    def said(self, k: int) -> str:
        below = self.nodes[k + 1:k + 2]
        inside = below and below[0].depth > self.nodes[k].depth and below[0].role == "StaticText"
        return self.nodes[k].name or (below[0].name if inside else "") or ""

    def all(self, role: str, name: str | None = None) -> list[a11y.Node]:
        """The lines of a role, those alone that say `name`."""
        return [node for k, node in enumerate(self.nodes)
                if node.role == role and (name is None or self.said(k) == name)]

    def has(self, role: str, name: str | None = None) -> bool:
        return bool(self.all(role, name))

    def line(self, role: str, name: str | None = None, n: int = 0) -> a11y.Node:
        nodes = [node for node in self.all(role, name) if node.bid]
        if not -len(nodes) <= n < len(nodes):
            raise Lost(f"no {role} {name or ''} ({n + 1})")
        return nodes[n]

    def texts(self) -> list[str]:
        return [node.name for node in self.nodes if node.role == "StaticText" and node.name]

    def where(self, text: str) -> int:
        """The place of the first line that has this name."""
        for k, node in enumerate(self.nodes):
            if node.name == text:
                return k
        raise Lost(f"nothing says {text!r}")

    def after(self, text: str) -> "Page":
        """What stands below the line that says `text`."""
        page = Page("")
        page.nodes = self.nodes[self.where(text) + 1:]
        return page


def found(pattern: str, text: str) -> re.Match:
    """What a pattern finds. Raises Lost."""
    match = re.search(pattern, text)
    if not match:
        raise Lost(f"{text[:80]!r} has no {pattern}")
    return match


def quoted(goal: str) -> list[str]:
    return re.findall(r'"([^"]*)"', goal)


def nth(text: str) -> int:
    """
    >>> nth("Focus into the 2nd input textbox.")
    1
    """
    return int(found(r"(\d+)(?:st|nd|rd|th)", text)[1]) - 1


def between(goal: str, start: str, end: str) -> str:
    """
    >>> between("Select kX, y7 and click Submit.", "Select ", " and click")
    'kX, y7'
    """
    return found(f"{start}(.*?){end}", goal)[1]


# ---- what a player does ------------------------------------------------------------------------------------

def click(page: Page, role: str, name: str | None = None, n: int = 0) -> str:
    return str(Action("click", page.line(role, name, n).bid))


def hover(page: Page, role: str, name: str | None = None, n: int = 0) -> str:
    return str(Action("hover", page.line(role, name, n).bid))


def write(page: Page, text: str, n: int = 0, role: str = "textbox", enter: bool = False) -> str:
    return str(Action("type", page.line(role, None, n).bid, text, enter))


def press(key: str) -> str:
    return str(Action("press", text=key))


# ---- one click ---------------------------------------------------------------------------------------------

def click_button(goal, page):
    yield click(page, "button", quoted(goal)[0])


def click_test(goal, page):
    yield click(page, "button", "ONE" if "ONE" in goal else None)


def click_dialog(goal, page):
    yield click(page, "button", {"x": "Close"}.get(quoted(goal)[0], quoted(goal)[0]))


def click_tab(goal, page):
    yield click(page, "link", between(goal, "on ", r"\."))


def click_widget(goal, page):
    kind = quoted(goal)[0]
    yield click(page, "textbox" if kind in ("text", "textarea") else kind)


def focus_text(goal, page):
    yield click(page, "textbox", n=nth(goal) if "input" in goal else 0)


def offers(page: Page) -> list[tuple[int, int, str]]:
    """(minutes, dollars, button) of every flight that is sold on a page."""
    buttons = [node.name for node in page.all("button") if "$" in node.name]
    times = re.findall(r"(\d+)h (\d+)m", " ".join(page.texts()))
    return [(60 * int(hours) + int(minutes), int(name.split("$")[1]), name)
            for (hours, minutes), name in zip(times, buttons)]


def buy_ticket(goal, page):
    by_time = "duration" in goal or "time" in goal
    flights = sorted(offers(page), key=lambda offer: offer[0 if by_time else 1])
    yield click(page, "button", flights[0 if re.search("cheapest|shortest", goal) else -1][2])


# ---- text and choices --------------------------------------------------------------------------------------

def enter_text(goal, page):
    page = yield write(page, quoted(goal)[0])
    yield click(page, "button", "Submit")


def enter_text_2(goal, page):
    page = yield write(page, quoted(goal)[0].upper() if "upper" in goal else quoted(goal)[0].lower())
    yield click(page, "button", "Submit")


def enter_password(goal, page):
    for n in (0, 1):
        page = yield write(page, quoted(goal)[0], n)
    yield click(page, "button", "Submit")


def login_user(goal, page):
    for n in (0, 1):
        page = yield write(page, quoted(goal)[n], n)
    yield click(page, "button", "Login")


def login_user_popup(goal, page):
    def value(n):
        return page.line("textbox", None, n).attributes.get("value")
    while True:
        if page.has("button", "Cancel"):  # "Exit to home page?"
            page = yield click(page, "button", "Cancel")
        elif missing := [n for n in (0, 1) if not value(n)]:
            page = yield write(page, quoted(goal)[missing[0]], missing[0])
        else:
            page = yield click(page, "button", n=0)


def enter_date(goal, page):
    page = yield write(page, between(goal, "Enter ", " as the"), role="Date")
    yield click(page, "button", "Submit")


def enter_time(goal, page):
    page = yield write(page, between(goal, "Enter ", " as the"), role="InputTime")
    yield click(page, "button", "Submit")


def use_spinner(goal, page):
    page = yield write(page, between(goal, "Select ", " with"), role="spinbutton")
    yield click(page, "button", "Submit")


def chosen(role, end):
    """Chooses all that stands between `Select` and `end`, then submits."""
    def player(goal, page):
        names = between(goal, "Select ", end)
        for name in [] if names == "nothing" else names.split(", "):
            page = yield click(page, role, name)
        yield click(page, "button", "Submit")
    return player


def read_table(goal, page):
    page = yield write(page, page.after(between(goal, "value of ", " into")).line("cell").name)
    yield click(page, "button", "Submit")


def read_table_2(goal, page):
    for n, label in enumerate(page.all("LabelText")):
        name = page.said(page.nodes.index(label)).rstrip(":")
        page = yield write(page, page.after(name).line("cell").name, n)
    yield click(page, "button", "Submit")


def ask_table(goal, page):
    yield str(Action("stop", text=page.after(between(goal, "value of ", " in the table")).line("cell").name))


def click_button_sequence(goal, page):
    page = yield click(page, "button", "ONE")
    yield click(page, "button", "TWO")


def button_delay(goal, page):
    page = yield click(page, "button", "ONE")
    for _ in range(2 * int(between(goal, "wait ", " second")) - 1):  # an action is half a second
        page = yield hover(page, "button", "TWO")
    yield click(page, "button", "TWO")


def copy_paste(goal, page):
    values = [node.attributes.get("value") for node in page.all("textbox")]
    texts = [value for value in values if value]
    page = yield write(page, a11y.unquote(texts[nth(goal) if "text area" in goal else 0]), values.index(None))
    yield click(page, "button", "Submit")


def scroll_text(goal, page):
    text = a11y.unquote(page.all("textbox")[0].attributes["value"])
    page = yield write(page, text.split()[-1].strip(".,"), 1)
    yield click(page, "button", "Submit")


def find_word(goal, page):
    page = yield write(page, page.texts()[0].split()[nth(goal)].strip(".,"))
    yield click(page, "button", "Submit")


def text_transform(goal, page):
    page = yield write(page, "".join(page.texts()))
    yield click(page, "button", "Submit")


def simple_arithmetic(goal, page):
    a, sign, b = found(r"(-?\d+) (\S) (-?\d+)", page.texts()[0]).groups()
    a, b = int(a), int(b)
    page = yield write(page, str({"+": a + b, "-": a - b}.get(sign, a * b)))
    yield click(page, "button", "Submit")


def simple_algebra(goal, page):
    left, sign, right, total = found(r"(\S+) (\S) (\S+) = (-?\d+)", page.texts()[0]).groups()
    one = 1 if sign == "+" else -1  # left + one * right == total
    x = int(total) - one * int(right) if left == "x" else one * (int(total) - int(left))
    page = yield write(page, str(x))
    yield click(page, "button", "Submit")


def odd_or_even(goal, page):
    for n, number in enumerate(page.texts()):
        page = yield click(page, "button", "Odd" if int(number) % 2 else "Even", n)
    yield click(page, "button", "Submit")


def guess_number(goal, page):
    low, high = 0, 9
    while True:
        guess = (low + high) // 2
        page = yield write(page, str(guess), role="spinbutton")
        page = yield click(page, "button", "Submit")
        low, high = (guess + 1, high) if "higher" in page.texts()[0] else (low, guess - 1)


def generate_number(goal, page):
    fits = {"odd": lambda n: n % 2, "even": lambda n: n % 2 == 0}
    bound = re.search(r"(less|greater) than (-?\d+)", goal)
    test = ((lambda n: (n < int(bound[2])) == (bound[1] == "less")) if bound
            else fits[found("odd|even", goal)[0]])
    while not (re.fullmatch(r"-?\d+", page.texts()[0]) and test(int(page.texts()[0]))):
        page = yield click(page, "button", "Generate")
    yield click(page, "button", "Submit")


def stock_market(goal, page):
    while float(found(r"\$([\d.]+)", " ".join(page.texts()))[1]) >= float(between(goal, r"than \$", r"\.$")):
        page = yield hover(page, "button", "Buy")
    yield click(page, "button", "Buy")


# ---- lists, menus, trees -----------------------------------------------------------------------------------

def navigate_tree(goal, page):
    name, opened = quoted(goal)[0], set()
    while not page.has("listitem", name):
        folders = [node for k, node in enumerate(page.nodes) if node.role == "listitem" and node.bid
                   and page.said(k) not in opened]
        if not folders:
            raise Lost(f"no folder holds {name}")
        opened.add(page.said(page.nodes.index(folders[0])))
        page = yield str(Action("click", folders[0].bid))
    yield click(page, "listitem", name)


def click_menu(goal, page):
    *menus, last = between(goal, "Select ", "$").split(">")
    for name in menus:
        page = yield hover(page, "menuitem", name)
    yield click(page, "menuitem", last)


def click_menu_2(goal, page):
    icons = {"disk": "Save", "seek-start": "Prev", "seek-end": "Next", "zoomin": "Zoom In",
             "zoomout": "Zoom Out", "play": "Play", "stop": "Stop"}
    name = quoted(goal)[-1]
    name = icons.get(name.removeprefix("ui-icon-"), name)
    page = yield click(page, "button", "Menu")
    if not page.has("menuitem", name):
        page = yield hover(page, "menuitem", "Playback")
    yield click(page, "menuitem", name)


def click_collapsible(goal, page):
    page = yield click(page, "tab", n=0)
    yield click(page, "button", "Submit")


def use_autocomplete(goal, page):
    start, *end = quoted(goal)
    page = yield write(page, start)
    names = [text for text in page.texts() if text.startswith(start) and text.endswith("".join(end))]
    if not names:
        raise Lost(f"nothing starts with {start} and ends with {end}")
    page = yield click_item(page, names[0])
    yield click(page, "button", "Submit")


def click_item(page, name):
    """A click on the list item that holds the text `name`, with its bullet between them."""
    items = [node.bid for node in page.nodes[:page.where(name)] if node.role == "listitem"]
    return str(Action("click", items[-1]))


def phone_book(goal, page):
    name = between(goal, "Find ", " in the")
    link = {"phone": 0, "email": 1, "address": 2}[found("phone|email|address", goal)[0]]
    while not page.has("heading", name):
        page = yield click(page, "link", ">")
    yield click(page, "link", n=link)


def search_engine(goal, page):
    page = yield write(page, quoted(goal)[0])
    page = yield click(page, "button", "Search")
    where = nth(goal)
    for _ in range(where // 3):
        page = yield click(page, "link", ">")
    yield click(page, "link", n=where % 3)


# ---- sliders, dates, flights -------------------------------------------------------------------------------

def slide(page, target, place):
    """Moves the slider that has the focus, by keys, until its number (the place-th text) is the target's."""
    value, leap = int(page.texts()[place]), None  # what a PageUp is worth shows when it was pressed
    while value != target:
        way = "Up" if target > value else "Down"
        far = abs(target - value) > (leap / 2 if leap else 3)
        page = yield press(f"Page{way}" if far else f"Arrow{way}")
        moved = abs(int(page.texts()[place]) - value)
        leap = max(moved, 1) if far else leap  # at an end nothing moves
        value += int(page.texts()[place]) - value
    return page


def use_slider(goal, page):
    page = yield press("Tab")
    page = yield from slide(page, int(between(goal, "Select ", " with")), 0)
    yield click(page, "button", "Submit")


def use_slider_2(goal, page):
    for place, target in enumerate(between(goal, r"\[", r"\]").split(",")):
        page = yield press("Tab")
        page = yield from slide(page, int(target), place)
    yield click(page, "button", "Submit")


def form_sequence(goal, page):
    page = yield press("Tab")
    page = yield from slide(page, int(between(goal, "Select ", " with")), 0)
    page = yield click(page, "checkbox", n=nth(goal))
    yield click(page, "button", "Submit")


def form_sequence_2(goal, page):
    radio, box = goal.split(" and ")
    page = yield click(page, "radio", n=nth(radio))
    page = yield write(page, quoted(goal)[0], nth(box.split("into")[1]))
    yield click(page, "button", "Submit")


def form_sequence_3(goal, page):
    size = between(goal, "Choose ", " from")
    page = yield click(page, "option", size)
    page = yield click(page, "listitem", size)  # the list is open now, and lies over the buttons
    yield click(page, "button", quoted(goal)[0])


MONTHS = ("January February March April May June July August September October November December").split()


def pick_date(page, date, box):
    """Chooses a date (12/31/2016) in the calendar of a box."""
    month, day, _ = date.split("/")
    page = yield click(page, "textbox", n=box)
    while (ahead := [MONTHS.index(text) for text in page.texts() if text in MONTHS][0] + 1 - int(month)):
        page = yield click(page, "link", "Prev" if ahead > 0 else "Next")
    return (yield click(page, "link", str(int(day))))


def choose_date(goal, page):
    page = yield from pick_date(page, between(goal, "Select ", " as the"), 0)
    yield click(page, "button", "Submit")


def book_flight(goal, page):
    want, origin, to, date = found(r"Book the (\w+) .* from: (.*) to: (.*) on (\S+)\.$", goal).groups()
    for n, place in enumerate((origin, to)):
        page = yield write(page, place, n)
        page = yield click_item(page, [text for text in page.texts() if place in text][0])
    page = yield from pick_date(page, date, 2)
    page = yield click(page, "button", "Search")
    best = min(offers(page), key=lambda offer: offer[0 if want == "shortest" else 1])
    yield click(page, "button", best[2])


COLOURS = {  # as CSS has them
    "aqua": "00FFFF", "black": "000000", "blue": "0000FF", "gold": "FFD700", "gray": "808080",
    "green": "008000", "lime": "00FF00", "magenta": "FF00FF", "maroon": "800000", "navy": "000080",
    "olive": "808000", "orange": "FFA500", "pink": "FFC0CB", "purple": "800080", "red": "FF0000",
    "silver": "C0C0C0", "teal": "008080", "white": "FFFFFF", "yellow": "FFFF00"}


def use_colorwheel(goal, page):
    colour = re.search(r"#(\w{6})", goal)
    page = yield write(page, colour[1] if colour else COLOURS[between(goal, "Select ", " with")])
    yield click(page, "button", "Submit")


# ---- letters and posts -------------------------------------------------------------------------------------

def email_icon(place):
    """Clicks an icon of an email: the trash is the first, the star the second."""
    def player(goal, page):
        yield click(page.after(between(goal, "email by ", " and")), "image", n=place)
    return player


POSTS = ("Reply", "Retweet", "Like", "Share")


def social_media(goal, page):
    user, button = found(r"@\S+(?=,)", goal)[0], quoted(goal)[0]
    post = page.after(user)
    if button in POSTS[:3]:
        yield click(post, "image", n=POSTS.index(button))
    else:
        page = yield click(post, "image", n=3)
        items = {page.said(k): node.bid for k, node in enumerate(page.nodes) if node.role == "listitem"}
        yield str(Action("click", [bid for text, bid in items.items() if text.startswith(button)][0]))


def social_media_some(goal, page):
    user, button = found(r"@\S+", goal)[0], quoted(goal)[0]
    starts = [k for k, node in enumerate(page.nodes) if node.name == user]
    many = re.search(r"on (\d+) post", goal)
    for k in starts[:int(many[1]) if many else None]:
        icons = [node for node in page.nodes[k:] if node.role == "image"]
        page = yield str(Action("click", icons[POSTS.index(button)].bid))
    yield click(page, "button", "Submit")


# ---- ours --------------------------------------------------------------------------------------------------

def our_form(goal, page):
    for field, value in re.findall(r'(\w+) "([^"]*)"', goal):
        if page.has("textbox", field):
            page = yield write(page, value, [box.name for box in page.all("textbox")].index(field))
        else:
            lists = "option" if page.has("combobox", field) else "radio" if page.has("radio", value) else ""
            page = yield click(page, lists, value) if lists else click(page, "checkbox", field)
    yield click(page, "button", "Submit")


def our_list(goal, page):
    names = between(goal, "Choose ", ", then").replace(" and ", ", ").split(", ")
    for name in names:
        while not page.has("checkbox", name):
            page = yield click(page, "button", "Next")
        page = yield click(page, "checkbox", name)
    while page.has("button", "Next"):
        page = yield click(page, "button", "Next")
    yield click(page, "button", "Done")


checkboxes = chosen("checkbox", " and click")
PLAYERS: dict[str, Player] = {
    "ask-table": ask_table, "book-flight": book_flight, "book-flight-nodelay": book_flight,
    "button-delay": button_delay, "buy-ticket": buy_ticket, "choose-date": choose_date,
    "choose-date-easy": choose_date, "choose-date-medium": choose_date, "choose-date-nodelay": choose_date,
    "choose-list": chosen("option", " from the list"), "click-button": click_button,
    "click-button-sequence": click_button_sequence, "click-checkboxes": checkboxes,
    "click-checkboxes-large": checkboxes, "click-checkboxes-transfer": checkboxes,
    "click-collapsible": click_collapsible, "click-collapsible-nodelay": click_collapsible,
    "click-dialog": click_dialog, "click-dialog-2": click_dialog, "click-menu": click_menu,
    "click-menu-2": click_menu_2, "click-option": chosen("radio", " and click"),
    "click-scroll-list": chosen("option", " from the scroll list"), "click-tab": click_tab,
    "click-test": click_test, "click-test-2": click_test, "click-test-transfer": click_test,
    "click-widget": click_widget, "copy-paste": copy_paste, "copy-paste-2": copy_paste,
    "email-inbox-delete": email_icon(0), "email-inbox-important": email_icon(1), "enter-date": enter_date,
    "enter-password": enter_password, "enter-text": enter_text, "enter-text-2": enter_text_2,
    "enter-text-dynamic": enter_text, "enter-time": enter_time, "find-word": find_word,
    "focus-text": focus_text, "focus-text-2": focus_text, "form-sequence": form_sequence,
    "form-sequence-2": form_sequence_2, "form-sequence-3": form_sequence_3,
    "generate-number": generate_number, "guess-number": guess_number, "login-user": login_user,
    "login-user-popup": login_user_popup, "navigate-tree": navigate_tree, "odd-or-even": odd_or_even,
    "our-form": our_form, "our-list": our_list, "phone-book": phone_book, "read-table": read_table,
    "read-table-2": read_table_2, "scroll-text": scroll_text, "search-engine": search_engine,
    "simple-algebra": simple_algebra,
    "simple-arithmetic": simple_arithmetic, "social-media": social_media,
    "social-media-all": social_media_some, "social-media-some": social_media_some,
    "stock-market": stock_market, "text-transform": text_transform, "unicode-test": click_button,
    "use-autocomplete": use_autocomplete, "use-autocomplete-nodelay": use_autocomplete,
    "use-colorwheel": use_colorwheel, "use-colorwheel-2": use_colorwheel, "use-slider": use_slider,
    "use-slider-2": use_slider_2, "use-spinner": use_spinner,
}


# ---- playing -----------------------------------------------------------------------------------------------

@dataclass
class Played:
    """A player's try: T + 1 pages, T actions with their errors, why the player gave up ('': it did not)."""

    task: str
    seed: int
    goal: str
    pages: list[str]
    actions: list[str]
    errors: list[str]
    reward: int = 0
    over: bool = False
    lost: str = ""


def play(web, tries: list[tuple[str, int]], horizon: Callable[[str], int]) -> list[Played]:
    """Plays (task, seed) pairs side by side, each for at most horizon(task) actions. A world as
    worlds.miniwob.Browser. Raises RuntimeError where a page broke: that is no player's failure."""
    played, players, asked = [], [], []
    for (task, seed), obs in zip(tries, web.reset([data.start(task, seed) for task, seed in tries])):
        played.append(Played(task, seed, obs.goal, [obs.page], [], []))
        players.append(PLAYERS[task](obs.goal, Page(obs.page)))
        asked.append(_next(played[-1], players[-1], None))
    while any(asked):
        seen, rewards, terminated, _ = web.step([data.parse_action(text) if text else None for text in asked])
        if any(web.failures):
            raise RuntimeError("; ".join(failure for failure in web.failures if failure))
        for n, text in enumerate(asked):
            if text:
                one = played[n]
                one.actions.append(text)
                one.pages.append(seen[n].page)
                one.errors.append(seen[n].error)
                one.reward, one.over = int(rewards[n]), terminated[n]
                done = one.over or len(one.actions) == horizon(one.task)
                asked[n] = "" if done else _next(one, players[n], Page(seen[n].page))
    return played


def _next(one: Played, player, page: Page | None) -> str:
    try:
        return next(player) if page is None else player.send(page)
    except StopIteration:
        one.lost = "it had done all"
    except (Lost, LookupError, ValueError) as problem:  # it misread the page
        one.lost = f"{type(problem).__name__}: {problem}"
    return ""
