// All that a page can ask of another host without leaving. OTHER is host:port of a listener in the test.
const http = 'http://OTHER';
function reach(area) {
  fetch(http + '/fetch', {mode: 'no-cors'}).catch(() => 0);
  new Image().src = http + '/image';
  navigator.sendBeacon(http + '/beacon', 'x');
  new WebSocket('ws://OTHER/socket');
  new EventSource(http + '/events');
  const work = `fetch('${http}/worker', {mode: 'no-cors'}).catch(() => 0)`;
  new Worker(URL.createObjectURL(new Blob([work])));
  const peer = new RTCPeerConnection({iceServers: [{urls: 'stun:OTHER'}]});
  peer.createDataChannel('x'); peer.createOffer().then(offer => peer.setLocalDescription(offer));
  try { new WebTransport('https://OTHER/quic').ready.catch(() => 0); } catch (problem) {}
  for (const rel of ['prefetch', 'preload', 'preconnect', 'dns-prefetch', 'stylesheet', 'icon'])
    document.head.insertAdjacentHTML('beforeend', `<link rel="${rel}" as="image" href="${http}/${rel}">`);
  area.insertAdjacentHTML('beforeend', `
    <iframe src="${http}/frame"></iframe><iframe src="file:///etc/passwd"></iframe>
    <object data="${http}/object"></object><video src="${http}/video"></video>`);
}
