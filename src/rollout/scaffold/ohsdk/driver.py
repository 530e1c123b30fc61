"""Runs the OpenHands SDK's default agent inside a sandbox: driver.py SETTINGS.json

Settings: instruction (path), logs (folder), model, base_url, api_key, max_turns, timeout (seconds of one
request).

The agent is the SDK's own default one in command line mode (tools terminal, file_editor, task_tracker,
finish, think; its condenser sums up when the proxy says that the context is full). One choice is made for it:
its terminal is a plain pseudo-terminal and never the sandbox's tmux, so that it is the same in every sandbox.

Writes events.jsonl, the SDK's record of the conversation, into the logs folder.

Exit status: 0 the agent finished (its tool `finish`, or a reply without a tool call), or its own detection of
loops stopped it; 3 it made all its turns; 1 it failed, and the last line says how.
"""

import json
import os
import sys
import traceback
from pathlib import Path

TURN_LIMIT = 3


def work(settings):
    from openhands.sdk import LLM, Conversation, Tool
    from openhands.tools.preset.default import get_default_agent

    llm = LLM(
        model="openai/" + settings["model"],
        base_url=settings["base_url"],
        api_key=settings["api_key"],
        usage_id="agent",
        native_tool_calling=True,
        timeout=settings["timeout"],
        # The proxy is near: its waits are told by retry-after, not by a far server's bad day.
        retry_min_wait=1,
        retry_max_wait=10,
    )
    agent = get_default_agent(llm=llm, cli_mode=True)
    agent = agent.model_copy(update={"tools": [
        Tool(name=tool.name, params={**tool.params, "terminal_type": "subprocess"}) if tool.name == "terminal" else tool
        for tool in agent.tools
    ]})

    last_error = []
    with open(Path(settings["logs"]) / "events.jsonl", "w") as log:
        def keep(event):
            log.write(event.model_dump_json(exclude_none=True) + "\n")
            log.flush()
            if type(event).__name__ == "ConversationErrorEvent":
                last_error[:] = [event]

        conversation = Conversation(
            agent=agent,
            workspace=os.getcwd(),
            callbacks=[keep],
            visualizer=None,
            max_iteration_per_run=settings["max_turns"],
        )
        try:
            conversation.send_message(Path(settings["instruction"]).read_text())
            conversation.run()
            status = conversation.state.execution_status.value
        finally:
            conversation.close()
    if last_error and last_error[0].code == "MaxIterationsReached":
        return TURN_LIMIT
    print(f"OpenHands ended: {status}")
    if status in ("finished", "stuck"):
        return 0
    if last_error:
        print(f"OpenHands failed: {last_error[0].code}: {last_error[0].detail}", file=sys.stderr)
    return 1


def main():
    settings = json.loads(Path(sys.argv[1]).read_text())
    # Before the agent's modules: litellm would otherwise ask the network for a price list.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    # A small policy has a small context.
    os.environ["ALLOW_SHORT_CONTEXT_WINDOWS"] = "true"
    # The runtime's bash only where the sandbox has none.
    os.environ["PATH"] = os.environ.get("PATH", "/usr/bin:/bin") + ":" + sys.prefix + "/fallback"
    Path(settings["logs"]).mkdir(parents=True, exist_ok=True)
    try:
        return work(settings)
    except Exception as error:
        traceback.print_exc()
        print(f"OpenHands failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
