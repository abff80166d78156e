// As the applications of WebArena-Infinity: the page keeps the state, in localStorage, and sends it.
const SEED = {
  theme: 'light',
  notes: [
    {id: 1, title: 'Shopping', text: 'Milk and eggs', starred: false},
    {id: 2, title: 'Holiday', text: 'Trains to Rome', starred: false},
    {id: 3, title: 'Taxes', text: 'Due in May', starred: true},
  ],
};

const State = {
  now: JSON.parse(localStorage.getItem('notes')) || SEED,
  changed() {
    localStorage.setItem('notes', JSON.stringify(this.now));
    fetch('/api/state', {
      method: 'PUT', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(this.now),
    }).catch(() => {});
    render();
  },
};
