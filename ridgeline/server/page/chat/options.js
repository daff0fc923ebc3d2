// The options of the chat as fields of a request. What is left empty is not sent: the server's own
// default holds then, which is the model's where it has one.

const FIELDS = {
  temperature: { name: "Temperature", read: number(0, Infinity) },
  top_p: { name: "Top p", read: number(0, 1) },
  max_completion_tokens: { name: "Max tokens", read: whole(1) },
  seed: { name: "Seed", read: whole(0) },
  response_format: { name: "JSON schema", read: schema },
};

/**
 * `values` are the texts in the form's fields, by their names. Fields of the request, or the first
 * problem: {field, message}.
 */
export function requestFields(values) {
  const fields = {};
  for (const [field, { name, read }] of Object.entries(FIELDS)) {
    const text = (values[field] ?? "").trim();
    if (!text) continue;
    try {
      fields[field] = read(text);
    } catch (error) {
      return { problem: { field, message: `${name} ${error.message}` } };
    }
  }
  return { fields };
}

function number(low, high) {
  return (text) => {
    const value = Number(text);
    if (!Number.isFinite(value) || value < low || value > high) {
      throw new Error(high === Infinity ? `must be a number of at least ${low}.` : `must be a number from ${low} to ${high}.`);
    }
    return value;
  };
}

function whole(low) {
  return (text) => {
    const value = Number(text);
    if (!Number.isSafeInteger(value) || value < low) throw new Error(`must be a whole number of at least ${low}.`);
    return value;
  };
}

function schema(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`is not JSON: ${error.message}`);
  }
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error("must be a JSON object.");
  return { type: "json_schema", json_schema: { name: "reply", schema: value, strict: true } };
}
