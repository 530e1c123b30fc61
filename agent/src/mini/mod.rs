//! The mini agent: one tool, `bash`, in a loop over OpenAI chat completions.
//!
//! ```text
//! messages = [system, user(instruction)]
//! repeat up to --max-turns: reply = POST {base}/chat/completions {model, messages, tools, stream?}
//!     messages += reply exactly as received
//!     no tool call -> end;  else run each call, messages += {role: tool, tool_call_id, content}
//! ```
//!
//! Its run is told on standard output, one JSON object a line: `start`, `retry`, `turn`, `tool`, `end`.
//! Exit status: [`Exit`].

mod bash;
mod client;

use client::{Client, ClientError};
use legorl_agent::{system_prompt, tools_json};
use serde_json::{json, Value};
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

const HELP: &str = "\
usage: legorl-agent mini [options] [INSTRUCTION]

  --instruction-file FILE   read the instruction from FILE
  --max-turns N             model calls (default 30)
  --command-timeout SECS    time limit of one command (default 60)
  --request-timeout SECS    time limit of one model call (default 3600)
  --stream                  ask for streamed replies

environment: OPENAI_BASE_URL (ends in /v1), MODEL, OPENAI_API_KEY (optional)
exit status: 0 done, 2 usage, 3 turn limit, 4 request refused, 5 no answer, 6 reply not understood";

/// Exit status of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// A reply without a tool call.
    Done = 0,
    /// Wrong arguments or environment.
    Usage = 2,
    /// `--max-turns` model calls were made.
    TurnLimit = 3,
    /// The endpoint refused a request for good (4xx).
    Refused = 4,
    /// The endpoint did not answer, or answered 429 or 5xx, through all retries.
    NoAnswer = 5,
    /// The reply was not a chat completion.
    BadReply = 6,
}

struct Options {
    instruction: String,
    max_turns: u32,
    command_timeout: Duration,
    request_timeout: Duration,
    stream: bool,
    base_url: String,
    model: String,
    api_key: Option<String>,
}

/// Runs the agent with the arguments after `mini`.
pub fn main(args: impl Iterator<Item = String>) -> ExitCode {
    let exit = match parse(args) {
        Ok(Some(options)) => run(&options),
        Ok(None) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(problem) => {
            eprintln!("legorl-agent mini: {problem}\n\n{HELP}");
            Exit::Usage
        }
    };
    ExitCode::from(exit as u8)
}

fn run(options: &Options) -> Exit {
    log(json!({"event": "start", "model": options.model, "instruction": options.instruction}));
    let (exit, detail) = match converse(options) {
        Ok(exit) => (exit, Value::Null),
        Err(error) => (error.exit, Value::String(error.problem)),
    };
    log(json!({"event": "end", "reason": format!("{exit:?}"), "exit": exit as u8, "detail": detail}));
    exit
}

fn converse(options: &Options) -> Result<Exit, ClientError> {
    let client = Client::new(options);
    let tools: Value = serde_json::from_str(tools_json()).map_err(|e| ClientError {
        exit: Exit::BadReply,
        problem: format!("prompt/tools.json: {e}"),
    })?;
    let mut messages = vec![
        json!({"role": "system", "content": system_prompt()}),
        json!({"role": "user", "content": options.instruction}),
    ];
    for turn in 1..=options.max_turns {
        let mut body = json!({"model": options.model, "messages": messages, "tools": tools});
        if options.stream {
            body["stream"] = Value::Bool(true);
        }
        let reply = client.complete(&body)?;
        log(json!({
            "event": "turn", "turn": turn, "finish_reason": reply.finish_reason, "usage": reply.usage,
            "message": reply.message,
        }));
        let calls = match reply.message.get("tool_calls") {
            Some(Value::Array(calls)) => calls.clone(),
            _ => Vec::new(),
        };
        messages.push(reply.message);
        if calls.is_empty() {
            return Ok(Exit::Done);
        }
        for call in calls {
            let content = run_tool(&call, options.command_timeout);
            messages.push(json!({
                "role": "tool", "tool_call_id": call.get("id").cloned().unwrap_or(Value::Null),
                "content": content,
            }));
        }
    }
    Ok(Exit::TurnLimit)
}

/// The content of the tool message. A call that cannot be run is told to the model, not to the user.
fn run_tool(call: &Value, timeout: Duration) -> String {
    let function = &call["function"];
    let name = function["name"].as_str().unwrap_or_default();
    if name != "bash" {
        return format!("error: there is no tool `{name}`, only `bash`");
    }
    // A JSON text by the specification; some servers send the object itself.
    let arguments = match &function["arguments"] {
        Value::String(text) => serde_json::from_str(text).unwrap_or(Value::Null),
        other => other.clone(),
    };
    let Some(command) = arguments["command"].as_str() else {
        return "error: `bash` takes one string argument, `command`".to_string();
    };
    let content = match bash::run(command, timeout) {
        Ok((window, exit)) => window.tool_result(exit),
        Err(error) => format!("error: the shell could not be started: {error}"),
    };
    log(json!({"event": "tool", "command": command, "result": content}));
    content
}

/// One line on standard output. A reader that went away is no reason to stop working.
fn log(event: Value) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{event}");
    let _ = out.flush();
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let env = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    let (mut instruction, mut max_turns, mut stream) = (None, 30, false);
    let (mut command_timeout, mut request_timeout) = (60, 3600);
    let (mut given, mut file) = (Vec::new(), None);
    while let Some(arg) = args.next() {
        let mut number = || -> Result<u32, String> {
            let value = args.next().ok_or(format!("{arg} needs a value"))?;
            match value.parse() {
                Ok(n) if n > 0 => Ok(n),
                _ => Err(format!("{arg}: `{value}` is not a positive number")),
            }
        };
        match arg.as_str() {
            "--help" | "-h" => return Ok(None),
            "--max-turns" => max_turns = number()?,
            "--command-timeout" => command_timeout = number()?,
            "--request-timeout" => request_timeout = number()?,
            "--stream" => stream = true,
            "--instruction-file" => file = Some(args.next().ok_or("--instruction-file needs a value")?),
            option if option.starts_with("--") => return Err(format!("unknown option {option}")),
            _ => given.push(arg),
        }
    }
    if !given.is_empty() {
        instruction = Some(given.join(" "));
    }
    if let Some(file) = file {
        let text = std::fs::read_to_string(&file).map_err(|e| format!("{file}: {e}"))?;
        instruction = Some(text.trim_end().to_string());
    }
    Ok(Some(Options {
        instruction: instruction
            .filter(|i| !i.trim().is_empty())
            .ok_or("no instruction")?,
        max_turns,
        command_timeout: Duration::from_secs(command_timeout.into()),
        request_timeout: Duration::from_secs(request_timeout.into()),
        stream,
        base_url: env("OPENAI_BASE_URL").ok_or("OPENAI_BASE_URL is not set")?,
        model: env("MODEL").ok_or("MODEL is not set")?,
        api_key: env("OPENAI_API_KEY"),
    }))
}
