"""A benchmark of a test's own pages, for envs.Env in a real Chromium: no network, no waiting. A page whose
title begins with `won` is a success. `sites`: {name: HTML}, as JSON. Seed 1: with controls."""

import json

from browsergym.core.task import OpenEndedTask

from envs.browsergym import Browser, Page


class Own(Page, OpenEndedTask):
    clock, settle = "2020-01-06T00:00:00Z", 0.0

    def __init__(self, start, pages):
        super().__init__(start.seed, f"http://own/{start.task}", "Do it.")
        self.pages, self.controls = pages, start.seed == 1

    def serve(self, request):
        host, _, name = request.url.partition("http://own/")
        if host:
            return None
        return {"body": self.pages.get(name, ""), "content_type": "text/html; charset=utf-8"}

    def validate(self, page, chat_messages):
        won = page.title().startswith("won")
        return float(won), won


def browser(on):
    return Browser(lambda start: Own(start, json.loads(on.sites)))
