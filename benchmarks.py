"""Other people's tasks behind the same reset/step: for now any BrowserGym task.

    with BrowserGymPages() as web:
        obs = web.reset([Start("browsergym/miniwob.click-test", seed=7, ...)])
        obs, rewards, terminated, truncated = web.step([parse_action("click [13]")])

BrowserGym is Drouin et al. 2024, arXiv:2412.05467. It is slow: one environment a page, one after the other (a
reset takes 2 s, a step 0.3 s). A page reads as browser.py's do.
"""
