// A chat request as a command and as a program that a reader can take elsewhere. The key is never in
// them: they read it from OPENAI_API_KEY.

/** `body` is the request without its streaming fields, `url` that of the route. */
export function asCurl(url, body, needsKey) {
  const lines = [`curl ${quoted(url)}`, `  -H ${quoted("Content-Type: application/json")}`];
  if (needsKey) lines.push('  -H "Authorization: Bearer $OPENAI_API_KEY"');
  lines.push(`  -d ${quoted(JSON.stringify(body, null, 2))}`);
  return `${lines.join(" \\\n")}\n`;
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** For OpenAI's Python client; `base` is the address with /v1. */
export function asPython(base, body, needsKey) {
  const key = needsKey ? "" : ', api_key="unused"';
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value, 1)},\n`);
  return `from openai import OpenAI

client = OpenAI(base_url=${literal(base)}${key})${needsKey ? "  # reads OPENAI_API_KEY" : ""}
reply = client.chat.completions.create(
${fields.join("")})
print(reply.choices[0].message.content)
`;
}

/** A JSON value in Python's notation. */
function literal(value, depth = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((part) => literal(part, depth + 1))
    : Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${literal(part, depth + 1)}`);
  const line = `${open}${parts.join(", ")}${close}`;
  if (line.length <= 80 && !line.includes("\n")) return line;
  const indent = "    ".repeat(depth + 1);
  return `${open}\n${parts.map((part) => `${indent}${part},\n`).join("")}${"    ".repeat(depth)}${close}`;
}
