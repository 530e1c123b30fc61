//! The smaller sections of `task.toml`: probes, accelerators, servers, artifacts, steps.

use super::config::{read_agent, read_verifier, take_choice, AgentConfig, VerifierConfig};
use super::reader::{Fields, Node};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// `healthcheck`: a command that must succeed before the agent starts; times in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Healthcheck {
    /// Shell command; exit code 0 is healthy.
    pub command: String,
    /// Time between two probes.
    pub interval_sec: f64,
    /// Time limit of one probe.
    pub timeout_sec: f64,
    /// Time after the start in which failures do not count.
    pub start_period_sec: f64,
    /// Time between two probes in that period.
    pub start_interval_sec: f64,
    /// Failures in a row that end the trial.
    pub retries: i64,
}

/// `environment.tpu`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tpu {
    /// Accelerator type.
    pub kind: String,
    /// `NxM` or `NxMxK`.
    pub topology: String,
}

/// An entry of `environment.mcp_servers`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct McpServer {
    /// Name that the agent shows.
    pub name: String,
    /// `stdio`, `sse` or `streamable-http`.
    pub transport: String,
    /// Address, for the HTTP transports.
    pub url: Option<String>,
    /// Program, for `stdio`.
    pub command: Option<String>,
    /// Its arguments.
    pub args: Vec<String>,
    /// Headers, for the HTTP transports.
    pub headers: BTreeMap<String, String>,
}

/// An entry of `artifacts`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Artifact {
    /// Path inside the sandbox.
    pub source: String,
    /// Path below the trial's artifacts folder.
    pub destination: Option<String>,
    /// Patterns that are left out.
    pub exclude: Vec<String>,
    /// Compose service; `None` is the agent's container.
    pub service: Option<String>,
}

/// An entry of `verifier.collect`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CollectHook {
    /// Shell command.
    pub command: String,
    /// Compose service.
    pub service: String,
    /// Time limit in seconds.
    pub timeout_sec: f64,
    /// User name or id.
    pub user: Option<String>,
}

/// An entry of `steps`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepConfig {
    /// Folder below `steps/`.
    pub name: String,
    /// Its `[agent]`.
    pub agent: AgentConfig,
    /// Its `[verifier]`.
    pub verifier: VerifierConfig,
    /// Rewards below which the remaining steps are skipped, by reward name.
    pub min_reward: BTreeMap<String, f64>,
    /// Probe before its agent starts.
    pub healthcheck: Option<Healthcheck>,
    /// Its artifacts.
    pub artifacts: Vec<Artifact>,
}

const MAIN_SERVICE: &str = "main";

pub(super) fn read_healthcheck(node: &Node<'_>) -> Option<Healthcheck> {
    let mut table = node.fields()?;
    let command = table.require("command").and_then(|n| n.string());
    let mut seconds = |name, default| table.take(name).and_then(|n| n.float()).unwrap_or(default);
    let check = Healthcheck {
        command: command.unwrap_or_default(),
        interval_sec: seconds("interval_sec", 5.0),
        timeout_sec: seconds("timeout_sec", 30.0),
        start_period_sec: seconds("start_period_sec", 0.0),
        start_interval_sec: seconds("start_interval_sec", 5.0),
        retries: table.take("retries").and_then(|n| n.integer()).unwrap_or(3),
    };
    table.finish();
    Some(check)
}

pub(super) fn read_tpu(node: &Node<'_>) -> Option<Tpu> {
    let mut table = node.fields()?;
    let kind = table.require("type").and_then(|n| {
        let kind = n.string()?;
        if kind.is_empty() {
            n.error("must not be empty");
        }
        Some(kind)
    });
    let topology = table.require("topology").and_then(|n| {
        let text = n.string()?.trim().to_owned();
        let axes: Vec<_> = text.split('x').collect();
        let is_axis = |axis: &&str| {
            axis.bytes().all(|b| b.is_ascii_digit()) && !axis.is_empty() && !axis.starts_with('0')
        };
        if axes.len() < 2 || !axes.iter().all(is_axis) {
            n.error(format!(
                "is `{text}`; it must be sizes joined by `x`, such as 2x4"
            ));
        }
        Some(text)
    });
    table.finish();
    Some(Tpu {
        kind: kind?,
        topology: topology?,
    })
}

pub(super) fn take_mcp_servers(fields: &mut Fields<'_>) -> Vec<McpServer> {
    let items = fields
        .take("mcp_servers")
        .and_then(|n| n.list())
        .unwrap_or_default();
    items.iter().filter_map(read_mcp_server).collect()
}

fn read_mcp_server(node: &Node<'_>) -> Option<McpServer> {
    let mut table = node.fields()?;
    let name = table.require("name").and_then(|n| n.string()).unwrap_or_default();
    let transport = take_choice(
        &mut table,
        "transport",
        &["stdio", "sse", "streamable-http", "http"],
    )
    .map_or_else(
        || "sse".to_owned(),
        |t| {
            if t == "http" {
                "streamable-http".to_owned()
            } else {
                t
            }
        },
    );
    let url = table.take("url").and_then(|n| n.string());
    let command = table.take("command").and_then(|n| n.string());
    let args = table.take("args").and_then(|n| n.strings()).unwrap_or_default();
    let mut headers = BTreeMap::new();
    if let Some(node) = table.take("headers") {
        headers = node.string_map().unwrap_or_default();
        for (header, value) in &headers {
            if let Err(problem) = super::headers::check(header, value) {
                node.error(problem);
            }
        }
    }
    let given = |field: &Option<String>| field.as_deref().is_some_and(|text| !text.is_empty());
    if transport == "stdio" {
        if !given(&command) {
            table.error("needs `command` for transport `stdio`");
        }
        if !headers.is_empty() {
            table.error("has `headers`, which only HTTP transports take");
        }
    } else if !given(&url) {
        table.error(format!("needs `url` for transport `{transport}`"));
    }
    table.finish();
    Some(McpServer {
        name,
        transport,
        url,
        command,
        args,
        headers,
    })
}

/// A Docker Compose service name, trimmed.
fn service_name(node: &Node<'_>) -> Option<String> {
    let name = node.string()?.trim().to_owned();
    let valid = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'));
    if !valid {
        node.error(format!(
            "is `{name}`; a service name starts with a letter or digit and holds letters, digits, `-`, `_`, `.`"
        ));
    }
    Some(name)
}

pub(super) fn take_artifacts(fields: &mut Fields<'_>) -> Vec<Artifact> {
    let items = fields
        .take("artifacts")
        .and_then(|n| n.list())
        .unwrap_or_default();
    items.iter().filter_map(read_artifact).collect()
}

fn read_artifact(node: &Node<'_>) -> Option<Artifact> {
    if node.is_string() {
        let source = node.string()?;
        check_source(node, &source);
        return Some(Artifact {
            source,
            destination: None,
            exclude: Vec::new(),
            service: None,
        });
    }
    if !node.is_table() {
        node.error("must be a path or a table");
        return None;
    }
    let mut table = node.fields()?;
    let source = table.require("source").and_then(|n| {
        let source = n.string()?;
        check_source(&n, &source);
        Some(source)
    });
    let destination = table.take("destination").and_then(|n| {
        let path = n.string().filter(|path| !path.is_empty())?;
        if let Err(problem) = check_destination(&path) {
            n.error(format!("is `{path}`; it {problem}"));
        }
        Some(path)
    });
    let exclude = table
        .take("exclude")
        .and_then(|n| n.strings())
        .unwrap_or_default();
    let service = table.take("service").and_then(|n| service_name(&n));
    if let (Some(source), Some(service)) = (&source, &service) {
        if service != MAIN_SERVICE && !is_absolute(source) {
            table.error(format!(
                "collects `{source}` from service `{service}`; there the source must be an absolute path"
            ));
        }
    }
    table.finish();
    Some(Artifact {
        source: source?,
        destination,
        exclude,
        service,
    })
}

fn has_parent(path: &str) -> bool {
    path.split('/').any(|part| part == "..")
}

fn check_source(node: &Node<'_>, source: &str) {
    if has_parent(source) {
        node.error(format!("is `{source}`; it must not contain `..`"));
    }
}

fn is_absolute(path: &str) -> bool {
    let bytes = path.as_bytes();
    let drive = bytes.len() > 2
        && bytes[0].is_ascii_alphabetic()
        && bytes[1] == b':'
        && matches!(bytes[2], b'/' | b'\\');
    path.starts_with('/') || drive
}

fn check_destination(path: &str) -> Result<(), &'static str> {
    if path.contains('\\') {
        Err("must use `/` between folders")
    } else if path.starts_with('/') {
        Err("must be a relative path")
    } else if path.split('/').all(|part| part.is_empty() || part == ".") {
        Err("must name a file or folder")
    } else if has_parent(path) {
        Err("must not contain `..`")
    } else if path.trim_end_matches('/') == "manifest.json" {
        Err("is reserved for the list of collected files")
    } else {
        Ok(())
    }
}

pub(super) fn take_collect(fields: &mut Fields<'_>) -> Vec<CollectHook> {
    let items = fields.take("collect").and_then(|n| n.list()).unwrap_or_default();
    items
        .iter()
        .filter_map(|node| {
            let mut table = node.fields()?;
            let hook = CollectHook {
                command: table
                    .require("command")
                    .and_then(|n| n.string())
                    .unwrap_or_default(),
                service: table
                    .take("service")
                    .and_then(|n| service_name(&n))
                    .unwrap_or_else(|| MAIN_SERVICE.to_owned()),
                timeout_sec: table.take("timeout_sec").and_then(|n| n.float()).unwrap_or(60.0),
                user: table.take("user").and_then(|n| n.user()),
            };
            table.finish();
            Some(hook)
        })
        .collect()
}

pub(super) fn read_steps(items: &[Node<'_>]) -> Vec<StepConfig> {
    let mut seen = BTreeSet::new();
    let mut steps = Vec::new();
    for node in items {
        let Some(mut table) = node.fields() else { continue };
        let name = table.require("name").and_then(|n| {
            let name = n.string()?;
            if let Err(problem) = check_step_name(&name) {
                n.error(format!("is `{name}`; {problem}"));
            }
            if !seen.insert(name.to_lowercase()) {
                n.error(format!(
                    "`{name}` is used by an earlier step (case does not count)"
                ));
            }
            Some(name)
        });
        let agent = table.take("agent").and_then(|n| n.fields()).map(|mut section| {
            let agent = read_agent(&mut section);
            section.finish();
            agent
        });
        let verifier = table.take("verifier").map(|n| read_verifier(&n));
        let min_reward = table.take("min_reward").and_then(|n| {
            if n.is_table() {
                n.float_map()
            } else {
                n.float()
                    .map(|reward| BTreeMap::from([("reward".to_owned(), reward)]))
            }
        });
        let healthcheck = table.take("healthcheck").and_then(|n| read_healthcheck(&n));
        let artifacts = take_artifacts(&mut table);
        table.finish();
        steps.push(StepConfig {
            name: name.unwrap_or_default(),
            agent: agent.unwrap_or_default(),
            verifier: verifier.unwrap_or_default(),
            min_reward: min_reward.unwrap_or_default(),
            healthcheck,
            artifacts,
        });
    }
    steps
}

/// A step name is one folder name on every operating system.
fn check_step_name(name: &str) -> Result<(), &'static str> {
    let stem = name
        .split('.')
        .next()
        .unwrap_or_default()
        .trim_end_matches(' ')
        .to_uppercase();
    let numbered = |prefix: &str| {
        stem.strip_prefix(prefix)
            .is_some_and(|n| n.chars().count() == 1 && n.chars().all(|c| "123456789¹²³".contains(c)))
    };
    let is_device = matches!(
        stem.as_str(),
        "CON" | "PRN" | "AUX" | "NUL" | "CONIN$" | "CONOUT$"
    ) || numbered("COM")
        || numbered("LPT");
    if name.trim().is_empty() {
        Err("it must not be empty")
    } else if name == "." || name == ".." || name.ends_with(['.', ' ']) {
        Err("it must not end with a dot or a space")
    } else if name
        .chars()
        .any(|c| "<>:\"/\\|?*\u{7f}".contains(c) || (c as u32) < 0x20)
    {
        Err("it must be a plain folder name without < > : \" / \\ | ? * or control characters")
    } else if is_device {
        Err("it is the name of a device on Windows")
    } else if name.len() > 255 {
        Err("it must be at most 255 bytes")
    } else {
        Ok(())
    }
}
