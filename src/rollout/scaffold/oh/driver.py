"""Runs OpenHands, the full program, inside a sandbox.

    driver.py SETTINGS.json
    driver.py --agent-server -m openhands.agent_server --port N    (the app server starts it so)

Settings: instruction (path), logs (folder), model, base_url, api_key, max_turns, timeout (seconds of one
request).

The app server runs in this process and starts the agent server; both listen on loopback. Over the app
server's API the driver saves the settings of the model, starts a conversation with the task in the folder in
which it was started itself, and polls until the conversation has ended.

The program is written for containers of its own. What that needs here is in `shims` and `agent_server`.

Writes agent-server.log and conversation.json into the logs folder.

Exit status: 0 the conversation ended as finished, or its own detection of loops stopped it; 3 it made all its
turns; 1 something failed, and the last line says what.
"""

import json
import os
import runpy
import shutil
import socket
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path

TURN_LIMIT = 3
#: Seconds for the app server and for the agent server to start; a loaded machine needs a minute for each.
START_LIMIT = 300
#: Private files of the program; not the task's folder, which the verifier may look at.
STATE = "/run/legorl-oh"


def free_port(start):
    for port in range(start, start + 200):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise RuntimeError(f"no free port from {start} on")


def environment(settings):
    """Before any module of the program is read."""
    os.makedirs(STATE + "/bin", exist_ok=True)
    # It lists browser tools only if there is a browser. None is in the sandbox and no network either: a
    # stand-in keeps the tools of the program as they are, and their use ends in an error that the agent sees.
    browser = STATE + "/bin/chromium"
    with open(browser, "w") as f:
        f.write("#!/bin/sh\necho 'there is no browser in this sandbox' >&2\nexit 1\n")
    server = STATE + "/bin/agent-server"
    with open(server, "w") as f:
        f.write(f'#!/bin/sh\nexec "{sys.executable}" -u "{os.path.abspath(__file__)}" --agent-server "$@"\n')
    for program in (browser, server):
        os.chmod(program, 0o755)
    # The runtime's bash and git only where the sandbox has none.
    path = os.environ.get("PATH", "/usr/bin:/bin")
    os.environ.update({
        "PATH": f"{STATE}/bin:{path}:{sys.prefix}/fallback",
        "RUNTIME": "process",
        "OH_PERSISTENCE_DIR": STATE + "/state",
        "FILE_STORE_PATH": STATE + "/state",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
        "SERVE_FRONTEND": "false",
        "OH_PRELOAD_TOOLS": "false",
        "OH_ENABLE_VNC": "false",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "POSTHOG_DISABLED": "1",
        "DO_NOT_TRACK": "1",
    })
    os.makedirs(os.environ["OH_PERSISTENCE_DIR"], exist_ok=True)


def agent_server(arguments):
    """The agent server: `-m MODULE …`, as Python itself would run it."""
    from openhands.agent_server import event_service

    # As `clone_or_init_git_repo` of the app server.
    event_service.EventService._ensure_workspace_is_git_repo = staticmethod(lambda working_dir: None)
    module, sys.argv = arguments[1], arguments[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def shims(workspace):
    """Corrections of the app server for this place."""
    from openhands.app_server.sandbox import process_sandbox_service as process
    from openhands.app_server.sandbox import process_sandbox_spec_service as spec

    # A server that waits for a request is "sleeping" for the system and for ever "starting" for the program.
    status = process.ProcessSandboxService._get_process_status

    def alive(self, info):
        found = status(self, info)
        return process.SandboxStatus.RUNNING if found == process.SandboxStatus.STARTING else found

    process.ProcessSandboxService._get_process_status = alive

    # Its 30 seconds for the agent server are too few on a loaded machine.
    ready = process.ProcessSandboxService._wait_for_server_ready

    async def patient(self, port, timeout=30):
        return await ready(self, port, START_LIMIT)

    process.ProcessSandboxService._wait_for_server_ready = patient

    # In a container it looks for its servers on the container's host. They are here.
    import openhands.app_server.utils.docker_utils as docker

    plain = lambda url, replacement="": url  # noqa: E731
    for module in [docker, *list(sys.modules.values())]:
        if getattr(module, "__name__", "").startswith("openhands.app_server") and hasattr(
            module, "replace_localhost_hostname_for_docker"
        ):
            module.replace_localhost_hostname_for_docker = plain

    # The agent works in the task's folder and not in one of its own.
    inject = spec.ProcessSandboxSpecServiceInjector.inject

    async def here(self, state, request=None):
        for one in self.specs:
            one.working_dir = workspace
        async for service in inject(self, state, request):
            yield service

    spec.ProcessSandboxSpecServiceInjector.inject = here

    # The agent server needs a correction too, and is started through this file.
    start = process.ProcessSandboxService._start_agent_process

    async def through_driver(self, **given):
        self.python_executable = STATE + "/bin/agent-server"
        return await start(self, **given)

    process.ProcessSandboxService._start_agent_process = through_driver

    # It would make every task's folder a git repository, and the verifier would find it.
    from openhands.app_server.app_conversation import app_conversation_service_base as base

    async def nothing(self, *_, **__):
        return None

    base.AppConversationServiceBase.clone_or_init_git_repo = nothing
    base.AppConversationServiceBase.maybe_setup_git_hooks = nothing


class Api:
    """The app server's API."""

    def __init__(self, port):
        self.base = f"http://127.0.0.1:{port}"

    def call(self, method, path, body=None, limit=120):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data=data, method=method)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=limit) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.code} {error.read()[:600].decode(errors='replace')}") from None
        return json.loads(text) if text else None

    def wait(self, limit):
        end = time.monotonic() + limit
        while True:
            try:
                return urllib.request.urlopen(self.base + "/alive", timeout=5).read()
            except urllib.error.HTTPError:
                return None
            except OSError as error:
                if time.monotonic() > end:
                    raise RuntimeError(f"waited {limit} s for the app server: {error}") from None
                time.sleep(0.5)


def serve(port):
    import uvicorn
    from openhands.app_server.app import app

    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")
    server = uvicorn.Server(config)
    # Signals belong to the main thread, which is the driver's.
    server.install_signal_handlers = lambda: None
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    return server


def started(api, task):
    """The conversation's id, when its agent server is there."""
    end = time.monotonic() + START_LIMIT + 60
    while time.monotonic() < end:
        task = api.call("GET", f"/api/v1/app-conversations/start-tasks?ids={task['id']}")[0]
        if task["status"] == "READY":
            return task["app_conversation_id"]
        if task["status"] == "ERROR":
            raise RuntimeError(f"the conversation did not start: {task.get('detail')}")
        time.sleep(0.5)
    raise RuntimeError(f"waited {START_LIMIT + 60} s for the conversation to start; it is at {task['status']}")


def work(settings):
    environment(settings)
    workspace = os.getcwd()
    logs = Path(settings["logs"])
    logs.mkdir(parents=True, exist_ok=True)
    shims(workspace)
    port = free_port(3000)
    serve(port)
    api = Api(port)
    api.wait(START_LIMIT)
    api.call("POST", "/api/v1/settings", {
        "agent_settings_diff": {"llm": {
            "model": "openai/" + settings["model"],
            "base_url": settings["base_url"],
            "api_key": settings["api_key"],
            "native_tool_calling": True,
            "timeout": settings["timeout"],
            "retry_min_wait": 1,
            "retry_max_wait": 10,
        }},
        "conversation_settings_diff": {"max_iterations": settings["max_turns"]},
    })
    instruction = Path(settings["instruction"]).read_text()
    task = api.call("POST", "/api/v1/app-conversations", {
        "initial_message": {"role": "user", "content": [{"type": "text", "text": instruction}], "run": True},
    })
    conversation = started(api, task)
    print(f"the conversation has started: {conversation}", flush=True)
    # The agent's time is limited from outside, by the sandbox.
    while True:
        found = api.call("GET", f"/api/v1/app-conversations?ids={conversation}")[0]
        if found is None:
            raise RuntimeError("the conversation is gone")
        status = (found.get("execution_status") or "").lower()
        if status in ("finished", "error", "stuck", "paused") or found.get("sandbox_status") in ("ERROR", "MISSING"):
            break
        time.sleep(0.5)
    print(f"OpenHands ended: {status or found.get('sandbox_status')}", flush=True)
    detail = ""
    try:
        events = api.call("GET", f"/api/v1/conversation/{conversation}/events/search?limit=100")["items"]
        (logs / "conversation.json").write_text(json.dumps({"conversation": found, "events": events}))
        errors = [e for e in events if "Error" in e.get("kind", "") and "code" in e]
        if errors:
            detail = f"{errors[-1]['code']}: {errors[-1].get('detail', '')}"
    except (RuntimeError, KeyError, TypeError, OSError) as error:
        # The record is for people; how the conversation ended is known.
        print(f"the events could not be read: {error}")
    if detail.startswith("MaxIterationsReached"):
        return TURN_LIMIT
    if status in ("finished", "stuck"):
        return 0
    print(f"OpenHands failed: {detail or json.dumps(found)[:600]}", file=sys.stderr)
    return 1


def main():
    if sys.argv[1] == "--agent-server":
        return agent_server(sys.argv[2:])
    settings = json.loads(Path(sys.argv[1]).read_text())
    try:
        code = work(settings)
    except Exception as error:
        traceback.print_exc()
        print(f"OpenHands failed: {type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    for log in Path("/tmp/openhands-sandboxes").glob("*/.openhands-agent-server.log"):
        shutil.copyfile(log, Path(settings["logs"]) / "agent-server.log")
    sys.stdout.flush()
    sys.stderr.flush()
    # Both servers end with the driver: their threads and children are not waited for.
    os._exit(code)


if __name__ == "__main__":
    main()
