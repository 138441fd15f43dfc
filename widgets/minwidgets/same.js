// Equal by content, whatever the order of keys: a stored notebook reorders them.

const byKey = (_, it) => (it !== null && typeof it === "object" && !Array.isArray(it) ? Object.fromEntries(Object.entries(it).sort()) : it);
export const same = (one, other) => JSON.stringify(one, byKey) === JSON.stringify(other, byKey);
