const byId = id => document.getElementById(id);
let query = '', waiting;

function render() {
  document.body.className = State.now.theme;
  const found = State.now.notes.filter(note => (note.title + note.text).includes(query));
  byId('list').innerHTML = found.map(note => `<p>${note.text}</p>
    <div class="note" data-action="star" data-id="${note.id}">${note.starred ? '★' : '☆'} ${note.title}</div>`
  ).join('');
}

const ACTIONS = {
  star(id) {
    const note = State.now.notes.find(note => note.id == id);
    note.starred = !note.starred;
    State.changed();
  },
  settings() { byId('settings').classList.toggle('open'); },
  theme(id) { State.now.theme = id; State.changed(); },
  add() {
    const id = Math.max(...State.now.notes.map(note => note.id)) + 1;
    State.now.notes.push({id, title: byId('title').value, text: '', starred: false});
    State.changed();
  },
};

// One handler for all clicks: what is clicked has no listener and no role.
document.addEventListener('click', event => {
  const on = event.target.closest('[data-action]');
  if (on) ACTIONS[on.dataset.action](on.dataset.id);
});
byId('search').addEventListener('input', event => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { query = event.target.value; render(); }, 200);
});

function listen() {
  const events = new EventSource('/api/events');
  events.onerror = () => { events.close(); setTimeout(listen, 5000); };
}

byId('today').textContent = new Date().toString();
byId('tip').textContent = 'Tip ' + Math.floor(1e6 * Math.random());
listen();
State.changed();
