// Two drawings on canvas; each also says in words what it shows.
export function prepared(canvas, height) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  return { pen, width, height };
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function line(pen, samples, kept, value, top, box, style) {
  pen.strokeStyle = style;
  pen.lineWidth = 2;
  pen.beginPath();
  const step = box.width / (kept - 1);
  samples.forEach((sample, i) => {
    const x = box.left + (kept - samples.length + i) * step;
    const y = box.bottom - (top ? Math.min(value(sample) / top, 1) : 0) * box.height;
    if (i) pen.lineTo(x, y);
    else pen.moveTo(x, y);
  });
  pen.stroke();
}

function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= value);
}

export function drawSpeed(canvas, note, samples, kept) {
  const { pen, width, height } = prepared(canvas, 150);
  const box = { left: 48, width: width - 52, bottom: height - 18, height: height - 28 };
  const top = rounded(Math.max(...samples.map((s) => Math.max(s.decode, s.prefill)), 1));
  pen.strokeStyle = colour("edge");
  pen.fillStyle = colour("soft");
  pen.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    const y = box.bottom - share * box.height;
    pen.strokeRect(box.left, y, box.width, 0);
    pen.fillText((share * top).toLocaleString("en"), box.left - 6, y + 4);
  }
  pen.textAlign = "left";
  pen.fillText(`${kept} s ago`, box.left, height - 3);
  pen.textAlign = "right";
  pen.fillText("now", width - 4, height - 3);
  line(pen, samples, kept, (s) => s.prefill, top, box, colour("prefill"));
  line(pen, samples, kept, (s) => s.decode, top, box, colour("decode"));
  pen.setLineDash([5, 4]);
  line(pen, samples, kept, (s) => s.usage, 1, box, colour("line"));
  pen.setLineDash([]);
  const now = samples.at(-1);
  if (now) note.textContent = `Now ${now.decode.toFixed(0)} generated and ${now.prefill.toFixed(0)} prompt tokens a second, ` +
    `${(100 * now.usage).toFixed(0)} % of the pages in use.`;
}

export function drawSteps(canvas, note, steps) {
  const { pen, width, height } = prepared(canvas, 110);
  const lanes = { prefill: 8, decode: 56 };
  const laneHeight = 38;
  pen.fillStyle = colour("free");
  for (const y of Object.values(lanes)) pen.fillRect(0, y, width, laneHeight);
  if (!steps.length) {
    note.textContent = "No step yet.";
    return;
  }
  const end = Math.max(...steps.map(([start, seconds]) => start + seconds));
  const span = Math.min(Math.max(end - steps[0][0], 0.001), 10);
  const most = { prefill: 1, decode: 1 };
  const shown = steps.filter(([start, seconds]) => start + seconds > end - span);
  for (const [, , phase, , tokens] of shown) most[phase] = Math.max(most[phase], tokens);
  for (const [start, seconds, phase, , tokens] of shown) {
    const left = ((start - (end - span)) / span) * width;
    const size = Math.max((tokens / most[phase]) * laneHeight, 3);
    pen.fillStyle = colour(phase);
    pen.fillRect(left, lanes[phase] + laneHeight - size, Math.max((seconds / span) * width - 0.5, 1), size);
  }
  const of = (phase) => shown.filter((step) => step[2] === phase);
  const mean = (found) => (found.length ? (1000 * found.reduce((sum, s) => sum + s[1], 0)) / found.length : 0);
  note.textContent = `The latest ${span.toFixed(1)} s: ` + ["prefill", "decode"].map((phase) =>
    `${of(phase).length} ${phase} steps of ${mean(of(phase)).toFixed(1)} ms, up to ${most[phase]} tokens`).join("; ") +
    ". Height: tokens of the step.";
}
