"""A chat in a web page on this machine, served by Gradio: `pip install -e '.[web]'`."""

import html
import importlib.util
import os
from typing import Any

from cory.chat.chain import Answer, Chain
from cory.errors import UserError
from cory.report.escape import printable

EXTRA = "pip install -c constraints.txt -e '.[web]'"


def check_gradio() -> None:
    """Raises a UserError if Gradio is not installed."""
    if importlib.util.find_spec("gradio") is None:
        raise UserError(f"web: expected gradio to be installed ({EXTRA}), got None")


def serve(chain: Chain, title: str, port: int | None = None) -> None:
    """Serves the page to this machine alone until Ctrl-C. Raises a UserError if the port is taken."""
    blocks, look = page(chain, title)
    try:
        blocks.launch(
            server_name="127.0.0.1", server_port=port, theme=look, share=False, footer_links=[], run_history=False,
            ssr_mode=False, quiet=True, prevent_thread_lock=True,
        )  # fmt: skip
    except OSError as error:
        raise UserError(
            f"port: expected a free port, got {port or 'none from 7860'} ({error})"
        ) from None
    print(f"{title}: {blocks.local_url} (Ctrl-C ends)", flush=True)
    blocks.block_thread()


def page(chain: Chain, title: str) -> tuple[Any, Any]:
    """The page, a `gradio.Blocks`, and its theme: a query, a box for every response, the order of the agents, the seed.

    Where reward or prompts read more than the query, there is a field for each of these columns.

    All that have it open share the models, one query at a time. Texts stand in text boxes, where nothing acts as HTML.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # nothing is sent anywhere
    import gradio

    # No font is fetched.
    look = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    with gradio.Blocks(title=title, analytics_enabled=False) as blocks:
        gradio.HTML(f"<h2>{html.escape(title)}</h2>")
        query = gradio.Textbox(
            label="Query", placeholder="text, or a JSON object with prompt and other columns"
        )
        hint = "empty: as in the run's data, if the query is one of it"
        with gradio.Row(visible=bool(chain.further_columns)):
            further = [
                gradio.Textbox(label=name, placeholder=hint) for name in chain.further_columns
            ]
        with gradio.Row():
            ask = gradio.Button("Ask", variant="primary")
            exchange = gradio.Button("Exchange roles", visible=len(chain.agents) > 1)
            seed = gradio.Number(chain.seed, label="Seed", precision=0, minimum=0)
        with gradio.Row():
            boxes = [
                gradio.Textbox(label=who, lines=6, interactive=False, min_width=280)
                for who in chain.speakers
            ]
        notes = gradio.Textbox(
            "\n".join(chain.notes), label="Notes", interactive=False, visible=bool(chain.notes)
        )
        order = gradio.State(chain.order)
        inputs, outputs = [query, seed, order, *further], [*boxes, notes]

        def answer(text: str, number: float | None, roles: list[int], *columns: str) -> list[Any]:
            chain.order = roles
            chain.seed = int(number or 0)
            shown = [gradio.update(label=who, value="") for who in chain.speakers]
            besides: list[str] = []
            errors = []
            try:
                for name, value in zip(chain.further_columns, columns, strict=True):
                    chain.set_column(name, value.strip())
                if text.strip():
                    responses = chain.ask(text)
                    shown = [
                        gradio.update(label=_label(response), value=printable(response.text))
                        for response in responses
                    ]
                    besides = [
                        printable(f"{name}: {value}")
                        for name, value in chain.read_besides(text).items()
                    ]
            except UserError as error:
                errors.append(str(error))
            lines = [*besides, *map(printable, [*chain.notes, *errors])]
            chain.notes.clear()
            return [*shown, gradio.update(value="\n".join(lines), visible=bool(lines))]

        gradio.on(
            [ask.click, query.submit, *(field.submit for field in further)],
            answer,
            inputs,
            outputs,
            concurrency_id="models",
            api_name="ask",
        )
        exchange.click(chain.exchanged, order, order).then(
            answer, inputs, outputs, concurrency_id="models"
        )
    return blocks, look


def _label(answer: Answer) -> str:
    """Who answered, and the rewards."""
    return f"{answer.who}: {answer.rewards}" if answer.rewards else answer.who
