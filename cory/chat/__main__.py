"""Talks to the agents of a run: a query is answered by the base, the pioneer and the observer, side by side.

    python -m cory.chat runs/imdb_cory_tiny                            # in the terminal
    python -m cory.chat runs/imdb_cory_tiny --web                      # in a web page on this machine
    python -m cory.chat runs/imdb_cory_tiny --order "[2, 1]"           # agent_2 as pioneer
    python -m cory.chat runs/imdb_cory_tiny/checkpoints/iter-000090    # as training went

A run that has not ended answers with its newest checkpoint. Rewards are the run's, where the query has all that they
need. The same query with the same seed gets the same responses. See docs/share.md.
"""

from cory.chat.config import ChatConfig
from cory.cli.arguments import Arguments, typed
from cory.cli.main import main
from cory.config import ModelConfig, SamplingConfig


def run() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("run", help="folder of a run, or of one of its checkpoints")
    parser.add_argument("--web", action="store_true", help="serve a web page instead")
    parser.add_class_arguments(ChatConfig, skip={"run"})
    arguments = vars(parser.of())
    web = arguments.pop("web")
    settings = ChatConfig(**arguments)
    settings.model = typed(ModelConfig, settings.model)
    settings.sampling = typed(SamplingConfig, settings.sampling)
    if web:
        from cory.chat.web import check_gradio, serve

        check_gradio()
    # After the settings are checked: importing torch takes seconds.
    from cory.chat.opened import opened
    from cory.chat.terminal import talk

    with opened(settings) as (what, chain):
        if web:
            serve(chain, what, settings.port)
        else:
            print(what, flush=True)
            talk(chain)


if __name__ == "__main__":
    main(run)
