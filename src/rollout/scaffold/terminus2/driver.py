"""Runs Harbor's Terminus 2 inside a sandbox: driver.py SETTINGS.json

Harbor runs this agent beside the sandbox and sends its terminal commands in. Here it runs inside, with the
interpreter of its read-only runtime, so that every byte it sends goes through the sandbox's own network, to
the proxy and nowhere else. Its environment class is therefore plain: a command is a child process.

Settings: instruction (path), logs (folder), model, base_url, api_key, session, max_turns, context_tokens,
output_tokens.

Writes into the logs folder what Harbor writes (trajectory.json, terminus_2.pane) and rollout.json:
{"rollout_details": the agent's own record of token ids and log-probs, "episodes", "summaries", "completed"}.

Exit status: 0 it marked the task as complete and confirmed that, or its terminal ended; 3 it made all its
turns; 1 it failed, and the last line says how.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

TURN_LIMIT = 3


class Result:
    """What Harbor's agents read of a command that ended."""

    def __init__(self, return_code, stdout, stderr):
        self.return_code, self.stdout, self.stderr = return_code, stdout, stderr


class Inside:
    """The sandbox, as an agent that runs in it sees it."""

    default_user = None
    session_id = "sandbox"

    def __init__(self, env):
        self.env = env

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None, **_):
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", command,
            cwd=cwd, env={**self.env, **(env or {})}, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec or 600)
        except asyncio.TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            return Result(124, "", f"waited {timeout_sec or 600} s for `{command[:100]}`")
        return Result(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))

    async def upload_file(self, source_path, target_path):
        shutil.copyfile(source_path, target_path)

    async def download_file(self, source_path, target_path):
        shutil.copyfile(source_path, target_path)

    async def is_dir(self, path, **_):
        return os.path.isdir(path)

    async def is_file(self, path, **_):
        return os.path.isfile(path)


def plain(value):
    """JSON of what Harbor keeps as its own types."""
    return value.model_dump() if hasattr(value, "model_dump") else str(value)


def is_notice(text):
    """The proxy's own answers when a session has used up what it may use (docs/proxy.md)."""
    return text.endswith("of this session is reached. No further reply is generated.") or text.endswith(
        "of this session has passed. No further reply is generated."
    )


class UsedUp(BaseException):
    """The session may not generate any more. No Exception: the agent would ask again."""


async def work(settings):
    # Before the agent's modules: litellm would otherwise ask the network for a price list.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ["OPENAI_API_KEY"] = settings["api_key"]
    commands_env = {k: v for k, v in os.environ.items() if k not in ("OPENAI_API_KEY", "LITELLM_LOCAL_MODEL_COST_MAP")}
    # The runtime's tmux before a sandbox's own, its bash only where the sandbox has none.
    commands_env["PATH"] = ":".join([sys.prefix + "/tools", os.environ.get("PATH", "/usr/bin:/bin"), sys.prefix + "/fallback"])

    from harbor.agents.terminus_2 import Terminus2
    from harbor.models.agent.context import AgentContext
    from harbor.models.trial.paths import EnvironmentPaths

    logs = Path(settings["logs"])
    logs.mkdir(parents=True, exist_ok=True)
    # Where the agent lets the terminal write its record.
    os.makedirs(str(EnvironmentPaths.agent_dir), exist_ok=True)
    context_tokens = settings["context_tokens"]
    agent = Terminus2(
        logs_dir=logs,
        model_name="openai/" + settings["model"],
        api_base=settings["base_url"],
        max_turns=settings["max_turns"],
        suppress_max_turns_warning=True,
        session_id=settings["session"],
        collect_rollout_details=True,
        record_terminal_session=False,
        # Its 8000 tokens of room would be more than a small context has.
        proactive_summarization_threshold=min(8000, context_tokens // 4),
        model_info={"max_input_tokens": context_tokens, "max_output_tokens": settings["output_tokens"]},
    )

    # A reply of the proxy itself ends the run: this agent would answer a text that is no JSON for ever.
    ask = agent._llm.call

    async def call(*args, **kwargs):
        response = await ask(*args, **kwargs)
        if is_notice(response.content):
            raise UsedUp(response.content)
        return response

    agent._llm.call = call

    inside, context = Inside(commands_env), AgentContext()
    used_up = None
    try:
        await agent.setup(inside)
        await agent.run(Path(settings["instruction"]).read_text(), inside, context)
    except UsedUp as notice:
        used_up = str(notice)
    finally:
        (logs / "rollout.json").write_text(json.dumps({
            "rollout_details": context.rollout_details,
            "episodes": agent._n_episodes,
            "summaries": agent._summarization_count,
            "completed": bool(agent._pending_completion),
        }, default=plain))
        pane = EnvironmentPaths.agent_dir / "terminus_2.pane"
        if os.path.isfile(pane) and not os.path.samefile(os.path.dirname(pane), logs):
            shutil.copyfile(pane, logs / "terminus_2.pane")
        await inside.exec("tmux kill-server")
    if used_up:
        print(used_up)
        return TURN_LIMIT
    if agent._n_episodes >= settings["max_turns"] and not agent._pending_completion:
        return TURN_LIMIT
    return 0


def main():
    settings = json.loads(Path(sys.argv[1]).read_text())
    try:
        return asyncio.run(work(settings))
    except Exception as error:
        traceback.print_exc()
        print(f"Terminus 2 failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
