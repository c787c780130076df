const field = document.getElementById("search");
field?.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const query of document.querySelectorAll(".query")) {
    const text = query.textContent.toLowerCase();
    query.hidden = !words.every((word) => text.includes(word));
  }
});
