window.dynaweb = {
  // The page's clock stands still but for pass(): what timers do depends on the actions alone.
  now: 0, timers: new Map(), last: 0, later: setTimeout.bind(window), asked: 0, hidden: 'script, style',
  controls: false,
  takeClock(start) {
    this.now = start;
    const set = repeats => (work, wait, ...values) => {
      const every = Math.max(1, +wait || 0);
      this.timers.set(++this.last, {at: this.now + every, every: repeats && every, work, values});
      return this.last;
    };
    const clear = id => { this.timers.delete(id); };
    setTimeout = set(false); setInterval = set(true);
    clearTimeout = clearInterval = cancelAnimationFrame = clear;
    requestAnimationFrame = work => setTimeout(() => work(this.now), 16);
    Date.now = () => this.now;
    const ask = window.fetch;  // an answer is awaited, whatever the clock says
    window.fetch = (...what) => { this.asked++; return ask(...what).finally(() => { this.asked--; }); };
    Date = new Proxy(Date, {
      construct: (date, values, kind) => Reflect.construct(date, values.length ? values : [this.now], kind),
      apply: () => new Date().toString()});
  },
  async pass(time) {
    const end = this.now + time;
    while (true) {
      let id = 0, timer = {at: Infinity};  // the next; of two at one time the one that was set first
      for (const [n, other] of this.timers) if (other.at < timer.at) [id, timer] = [n, other];
      if (timer.at > end) break;
      this.now = timer.at;
      if (timer.every) timer.at += timer.every; else this.timers.delete(id);
      const work = typeof timer.work == 'string' ? () => (0, eval)(timer.work) : timer.work;
      try { work.call(window, ...timer.values); } catch (problem) { console.error(problem); }
      await null;  // promises that it kept
    }
    this.now = end;
  },

  // ids: element -> number, nodes: number -> element, from the reset on. under: what the mouse is on. heard:
  // the elements that mark gave a listener.
  forget() { this.ids = new WeakMap(); this.nodes = []; this.under = null; this.heard = new WeakSet(); },

  async step(action) {  // without an action: only looks
    if (!this.ids) this.arrived();
    const error = action ? this.act(action) : '';
    await this.pass(500);  // BrowserGym's pre_observation_delay
    await new Promise(done => this.later(done));
    while (this.asked) await new Promise(done => this.later(done, 1));
    // Images on their way would move what is below them later.
    const coming = [...document.images].filter(image => !image.complete && image.loading != 'lazy');
    await Promise.all(coming.map(image => new Promise(done =>
      ['load', 'error'].forEach(end => image.addEventListener(end, done)))));
    this.mark();
    return {error, ...this.outcome()};
  },
  // Chromium has one clipboard for all pages: what one copies another could paste.
  ownClipboard() {
    let held = '';
    const chosen = el => el?.matches('input, textarea') ? el.value.slice(el.selectionStart, el.selectionEnd)
      : '' + getSelection();
    for (const type of ['copy', 'cut', 'paste']) addEventListener(type, event => {
      event.preventDefault(); event.stopImmediatePropagation();
      if (type == 'paste') document.execCommand('insertText', false, held);
      else held = chosen(document.activeElement) || held;
      if (type == 'cut') document.execCommand('delete');
    }, true);
    const own = {writeText: async text => { held = '' + text; }, readText: async () => held};
    Object.defineProperty(navigator, 'clipboard', {value: own});
  },

  arrived() { this.forget(); },  // on a page that was not reset: a link led here
  outcome() { return {}; },

  // Returns what was wrong, or ''. lines: the ids that the page's text shows; the others are in the DOM only.
  act({name, bid, text, lines}) {
    if (name == 'scroll') { scrollBy(0, text == 'up' ? -100 : 100); return ''; }
    if (name == 'press') {  // Tab or Shift+Tab; Python presses the other keys
      const stops = [...document.querySelectorAll('a[href],button,input,select,textarea,[tabindex]')]
        .filter(el => el.tabIndex >= 0 && !el.disabled && el.getClientRects().length);
      const now = stops.indexOf(document.activeElement), n = stops.length;
      if (n) stops[text == 'Tab' ? (now + 1) % n : now <= 0 ? n - 1 : now - 1].focus();
      return '';
    }
    const {error, el, found} = this.reach(name, bid, lines);
    if (error || !found) return error;
    const [clientX, clientY, target] = found;
    const settings = {bubbles: true, cancelable: true, view: window, clientX, clientY, detail: 1};
    const mouse = (type, on = target, relatedTarget = null, bubbles = true) =>
      on.dispatchEvent(new MouseEvent(type, {...settings, relatedTarget, bubbles}));
    if (name != 'type') this.move(target, mouse);
    if (name == 'hover') return '';
    if (name == 'click') {
      if (mouse('mousedown')) {  // not prevented: the focus moves, as under a mouse
        const focusable = target.closest('a[href],button,input,select,textarea,[tabindex],[contenteditable]');
        focusable ? focusable.focus() : document.activeElement.blur();
      }
      mouse('mouseup'); mouse('click'); return '';
    }
    if (el.isContentEditable) {
      el.closest('[contenteditable]').focus(); getSelection().selectAllChildren(el);
      document.execCommand(text ? 'insertText' : 'delete', false, text); return '';
    }
    const texts = ['text', 'password', 'search', 'email', 'tel', 'url'];
    const forms = {number: '-1.5', range: el.min + ' to ' + el.max, date: '12/31/2000', time: '11:59 PM',
                   color: '#0080ff'};
    const form = el.tagName == 'INPUT' && forms[el.type], before = el.value;
    const field = form || el.tagName == 'TEXTAREA' || el.tagName == 'INPUT' && texts.includes(el.type);
    if (!field || el.readOnly) return `[${bid}] takes no text`;
    if (form) {  // a date as an American keyboard writes it, or as the DOM does
      text = text.trim();
      const date = el.type == 'date' && /^\d+\/\d+\/\d{4}$/.test(text) && new Date(text);
      const time = el.type == 'time' && /^\d+:\d\d [ap]m$/i.test(text) && new Date('1/1/2000 ' + text);
      // Not the 30th of February, of which Date makes another day.
      if (date && date.getDate() == text.split('/')[1]) text = date.toISOString().slice(0, 10);
      if (+time) text = time.toISOString().slice(11, 16);
    }
    el.focus();
    if (el.disabled) return '';  // its own focus handler may disable it (a popup)
    // The prototype's setter: frameworks (React) watch the element's own, and would take this for no change.
    const kind = el.tagName == 'TEXTAREA' ? HTMLTextAreaElement : HTMLInputElement;
    Object.getOwnPropertyDescriptor(kind.prototype, 'value').set.call(el, text);
    if (form && el.value.toLowerCase() != text.toLowerCase()) {
      el.value = before; return `[${bid}] takes ${form} or the like, not ${text}`;
    }
    for (const type of ['input', 'change']) el.dispatchEvent(new Event(type, {bubbles: true}));
    return '';
  },

  // What was wrong, or the element and where to act on it. An option is chosen at once: {error: ''}.
  reach(name, bid, lines) {
    const el = this.nodes[bid];
    if (!el) return {error: `[${bid}] is not an element of the page`};  // a forged line
    if (el.tagName == 'OPTION') return {error: this.choose(el, name) ? '' : `[${bid}] takes no ${name}`};
    el.scrollIntoViewIfNeeded();
    const box = el.getClientRects()[0];
    if (!box || !el.checkVisibility({checkVisibilityCSS: true})) return {error: `[${bid}] is not visible`};
    if (el.matches(':disabled')) return {error: `[${bid}] is disabled`};
    const found = this.aim(el, box, new Set(lines.map(bid => this.nodes[bid])));
    return found ? {error: '', el, found} : {error: `[${bid}] is covered by another element`};
  },

  // The mouse comes from what it was on: menus open and close under it.
  move(to, mouse) {
    const from = this.under?.isConnected ? this.under : document.documentElement;
    const beside = (el, other) => el && !el.contains(other) ? [el, ...beside(el.parentElement, other)] : [];
    this.under = to;
    if (from !== to) {
      mouse('mouseout', from, to);
      beside(from, to).forEach(el => mouse('mouseleave', el, to, false));
      mouse('mouseover', to, from);
      beside(to, from).reverse().forEach(el => mouse('mouseenter', el, from, false));
    }
    mouse('mousemove');
  },

  // An option is chosen on its list, which may be closed.
  choose(el, name) {
    const list = el.closest('select');
    if (name != 'click' || list.disabled || el.disabled) return false;
    if (list.multiple) el.selected = !el.selected;
    else { list.value = el.value; list.selectedIndex = el.index; }
    list.focus();
    for (const type of ['input', 'change']) list.dispatchEvent(new Event(type, {bubbles: true}));
    return true;
  },

  // Where to act, and on what: the first of 25 points in the box, from the centre on, where el itself lies on
  // top, or a part of it that has no line of its own (own: the elements with a line). Else the first point
  // that no foreign element covers, on el itself. Undefined if there is none.
  aim(el, box, own) {
    const parts = [.5, .1, .3, .7, .9];
    let found;
    for (const [across, down] of parts.flatMap(a => parts.map(b => [a, b]))) {
      const x = box.left + across * box.width, y = box.top + down * box.height;
      const top = document.elementFromPoint(x, y);
      if (top && !el.contains(top) && !top.contains(el)) continue;  // covered here
      found ||= [x, y, el];
      let part = top;
      while (part && part !== el && !own.has(part)) part = part.parentElement;
      if (part === el) return [x, y, top];
    }
    return found;
  },

  // Gives every element its id and visibility, as attributes that BrowserGym's functions and take_ids read.
  mark() {
    const many = document.getElementsByTagName('*').length;
    if (many > NODES) throw Error(`${many} elements, at most NODES are read`);
    const clips = new Map(), all = {left: 0, top: 0, right: innerWidth, bottom: innerHeight};
    const meet = (a, b) => ({left: Math.max(a.left, b.left), top: Math.max(a.top, b.top),
                             right: Math.min(a.right, b.right), bottom: Math.min(a.bottom, b.bottom)});
    const cut = (el, seen) => {  // what CSS's clip leaves of el: nothing of a text for screen readers alone
      const edges = getComputedStyle(el).clip.match(/-?[\d.]+(?=px)/g);
      if (edges?.length != 4) return seen;
      const [top, right, bottom, left] = edges.map(Number), box = el.getBoundingClientRect();
      return meet(seen, {left: box.left + left, top: box.top + top, right: box.left + right,
                         bottom: box.top + bottom});
    };
    const clip = el => {  // the box that el's ancestors let through
      if (el === document.body) return all;
      if (!clips.has(el)) {
        const above = cut(el, clip(el.parentElement)), open = getComputedStyle(el).overflow == 'visible';
        clips.set(el, open ? above : meet(above, el.getBoundingClientRect()));
      }
      return clips.get(el);
    };
    // A drawing has an id, its parts have none, as in BrowserGym.
    const skip = el => !(el instanceof HTMLElement || el.tagName == 'svg') || el.matches(this.hidden);
    // Clicks that the document handles leave no listener on what is clicked. What shows a hand gets one, and
    // Chromium then calls it clickable.
    const hand = el => getComputedStyle(el).cursor == 'pointer' && (getComputedStyle(el.parentElement).cursor
      != 'pointer' || el.matches('a, button, input, [onclick], [data-action], [data-id]'));
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT,
      el => skip(el) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
    while (walk.nextNode()) {
      const el = walk.currentNode;
      if (!this.ids.has(el)) this.ids.set(el, this.nodes.push(el) - 1);
      if (this.controls && !this.heard.has(el) && hand(el)) {
        this.heard.add(el);
        el.addEventListener('click', () => {});
      }
      const bid = this.ids.get(el), mark = 'browsergym_id_' + bid;
      const box = el.getBoundingClientRect(), seen = cut(el, meet(box, clip(el.parentElement)));
      const area = box.width * box.height;
      const none = !el.getClientRects().length || seen.right < seen.left || seen.bottom < seen.top;
      const share = none ? 0 : area ? (seen.right - seen.left) * (seen.bottom - seen.top) / area : 1;
      const set = {bid: '' + bid, browsergym_visibility_ratio: share.toFixed(2),
                   'aria-roledescription': mark, 'aria-description': mark};
      for (const name in set) if (el.getAttribute(name) !== set[name]) el.setAttribute(name, set[name]);
    }
  },
};
dynaweb.ownClipboard();
