// The chat box: a conversation over /v1/chat/completions, streamed. Text of the model is only ever set as text.
const byId = (id) => document.getElementById(id);

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function said(who, text, kind = "") {
  const log = byId("log");
  const entry = document.createElement("p");
  const name = document.createElement("b");
  const words = document.createElement("span");
  name.textContent = who;
  words.textContent = text;
  entry.className = kind;
  entry.append(name, words);
  log.append(entry);
  log.scrollTop = log.scrollHeight;
  return words;
}

async function answered(messages, headers, signal, onText) {
  const got = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    signal,
    body: JSON.stringify({
      messages,
      stream: true,
      stream_options: { include_usage: true },
      temperature: Number(byId("temperature").value),
      max_tokens: Number(byId("max-tokens").value),
    }),
  });
  if (!got.ok) throw new Error((await got.json()).error.message);
  let end = null;
  for await (const event of events(got.body)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    if (choice?.delta.content) onText(choice.delta.content);
    end = choice?.finish_reason ?? end;
  }
  return end;
}

export function startChat(headers) {
  const messages = [];
  let leaving = null;

  async function send() {
    const text = byId("prompt").value.trim();
    if (!text || leaving) return;
    leaving = new AbortController();
    byId("send").disabled = true;
    byId("stop").disabled = false;
    byId("prompt").value = "";
    messages.push({ role: "user", content: text });
    said("You", text);
    const words = said("Model", "");
    try {
      const end = await answered(messages, headers(), leaving.signal, (more) => {
        words.textContent += more;
        byId("log").scrollTop = byId("log").scrollHeight;
      });
      if (end === "length") words.parentElement.title = "ended at max tokens";
    } catch (error) {
      if (error.name !== "AbortError") said("Server", error.message, "error");
    }
    if (words.textContent) messages.push({ role: "assistant", content: words.textContent });
    else {
      messages.pop();
      words.parentElement.remove();
    }
    leaving = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
    byId("prompt").focus();
  }

  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("stop").addEventListener("click", () => leaving?.abort());
  byId("clear").addEventListener("click", () => {
    leaving?.abort();
    messages.length = 0;
    byId("log").replaceChildren();
  });
}
