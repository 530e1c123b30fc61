//! `task.toml`, schema 1.4, as a typed value.
//!
//! [`TaskConfig::parse`] gives the verdict that `harbor` gives on the same text: the fields, their types and
//! the checks between fields are those of its task format. Two differences remain, both on the strict
//! side of nothing: unknown fields are reported as warnings, and the document may use TOML 1.1.

use super::network::{take_policy, NetworkMode, NetworkPolicy};
use super::reader::{Fields, Finding, Findings, Node, Severity};
use super::sections::{self, Artifact, Healthcheck, McpServer, StepConfig, Tpu};
use serde::Serialize;
use std::collections::BTreeMap;

/// Newest schema version that is known here.
pub const SCHEMA_VERSION: &str = "1.4";

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TaskConfig {
    /// `schema_version`; `version` in old files.
    pub schema_version: String,
    /// `[task]`.
    pub task: Option<PackageInfo>,
    /// `[metadata]`, free form.
    pub metadata: serde_json::Map<String, serde_json::Value>,
    /// `[agent]`.
    pub agent: AgentConfig,
    /// `[verifier]`.
    pub verifier: VerifierConfig,
    /// `[environment]`.
    pub environment: EnvironmentConfig,
    /// `[solution]` env.
    pub solution_env: BTreeMap<String, String>,
    /// `source`: where the task came from.
    pub source: Option<String>,
    /// `[[steps]]`; empty for a single-step task.
    pub steps: Vec<StepConfig>,
    /// `multi_step_reward_strategy`: `mean` or `final`.
    pub multi_step_reward_strategy: Option<String>,
    /// `artifacts`.
    pub artifacts: Vec<Artifact>,
}

/// `[task]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PackageInfo {
    /// `org/name`.
    pub name: String,
    /// Any non-empty text.
    pub version: Option<String>,
    /// For people.
    pub description: String,
    /// Names and addresses.
    pub authors: Vec<Author>,
    /// For search; the first one is the family of tasks without `metadata.family`.
    pub keywords: Vec<String>,
}

/// An entry of `task.authors`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Author {
    /// Name.
    pub name: String,
    /// E-mail address.
    pub email: Option<String>,
}

/// `[agent]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AgentConfig {
    /// Time limit of the agent in seconds; the run's own limit holds where it is absent.
    pub timeout_sec: Option<f64>,
    /// User name or id inside the sandbox.
    pub user: Option<String>,
    /// Override of the environment's network policy.
    pub network: NetworkPolicy,
}

/// `[verifier]`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VerifierConfig {
    /// Time limit in seconds.
    pub timeout_sec: f64,
    /// Variables of the test script; `${VAR}` and `${VAR:-default}` are taken from the host.
    pub env: BTreeMap<String, String>,
    /// User name or id inside the sandbox.
    pub user: Option<String>,
    /// `shared` or `separate`.
    pub environment_mode: Option<String>,
    /// `[verifier.environment]`.
    pub environment: Option<EnvironmentConfig>,
    /// `[[verifier.collect]]`.
    pub collect: Vec<sections::CollectHook>,
    /// Override of the environment's network policy.
    pub network: NetworkPolicy,
}

impl Default for VerifierConfig {
    fn default() -> Self {
        Self {
            timeout_sec: 600.0,
            env: BTreeMap::new(),
            user: None,
            environment_mode: None,
            environment: None,
            collect: Vec::new(),
            network: NetworkPolicy::default(),
        }
    }
}

impl VerifierConfig {
    /// The verifier wants a sandbox of its own.
    pub fn is_separate(&self) -> bool {
        match self.environment_mode.as_deref() {
            Some(mode) => mode == "separate",
            None => self.environment.is_some(),
        }
    }
}

/// `[environment]` and `[verifier.environment]`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EnvironmentConfig {
    /// Time limit of building or starting it, in seconds.
    pub build_timeout_sec: f64,
    /// Prebuilt image; then `environment/Dockerfile` is optional.
    pub docker_image: Option<String>,
    /// `linux` or `windows`.
    pub os: String,
    /// CPU cores.
    pub cpus: Option<f64>,
    /// Memory in MiB.
    pub memory_mb: Option<i64>,
    /// Disk in MiB.
    pub storage_mb: Option<i64>,
    /// Number of GPUs.
    pub gpus: Option<i64>,
    /// Acceptable GPU types.
    pub gpu_types: Vec<String>,
    /// TPU slice.
    pub tpu: Option<Tpu>,
    /// Servers offered to the agent.
    pub mcp_servers: Vec<McpServer>,
    /// Variables of every process in the sandbox; `${VAR}` templates as in [`VerifierConfig::env`].
    pub env: BTreeMap<String, String>,
    /// Folder of skills inside the sandbox.
    pub skills_dir: Option<String>,
    /// Probe after the start.
    pub healthcheck: Option<Healthcheck>,
    /// Working folder; wins over the Dockerfile's.
    pub workdir: Option<String>,
    /// Baseline network policy.
    pub network: NetworkPolicy,
}

impl Default for EnvironmentConfig {
    fn default() -> Self {
        Self {
            build_timeout_sec: 600.0,
            docker_image: None,
            os: "linux".to_owned(),
            cpus: None,
            memory_mb: None,
            storage_mb: None,
            gpus: None,
            gpu_types: Vec::new(),
            tpu: None,
            mcp_servers: Vec::new(),
            env: BTreeMap::new(),
            skills_dir: None,
            healthcheck: None,
            workdir: None,
            network: NetworkPolicy {
                mode: Some(NetworkMode::Public),
                allowed_hosts: Vec::new(),
            },
        }
    }
}

impl TaskConfig {
    /// Reads the text of a `task.toml`. `file` names it in findings. The value is only meaningful when no
    /// finding is an error.
    pub fn parse(file: &str, text: &str) -> (Self, Vec<Finding>) {
        let findings = Findings::new(file, text);
        let config = match toml::de::DeTable::parse(text) {
            Ok(document) => {
                let span = document.span();
                // The fields borrow the document, so it outlives them here.
                Self::read(Fields::new(&findings, String::new(), span, document.get_ref()))
            }
            Err(error) => {
                let span = error.span().unwrap_or(0..0);
                findings.push(
                    Severity::Error,
                    span,
                    "",
                    format!("not TOML: {}", error.message()),
                );
                Self::default()
            }
        };
        (config, findings.into_list())
    }

    fn read(mut fields: Fields<'_>) -> Self {
        let mut config = Self {
            schema_version: SCHEMA_VERSION.to_owned(),
            ..Self::default()
        };
        let old_version = fields.take("version");
        if let Some(node) = fields.take("schema_version").or(old_version) {
            if let Some(version) = node.string() {
                if is_newer(&version) {
                    node.warn(format!(
                        "is `{version}`; fields that are newer than {SCHEMA_VERSION} have no effect"
                    ));
                }
                config.schema_version = version;
            }
        }
        if let Some(mut table) = fields.take("task").and_then(|n| n.fields()) {
            config.task = Some(read_package(&mut table));
            table.finish();
        }
        if let Some(node) = fields.take("metadata") {
            match node.json() {
                serde_json::Value::Object(map) => config.metadata = map,
                _ => node.error("must be a table"),
            }
        }
        if let Some(mut table) = fields.take("agent").and_then(|n| n.fields()) {
            config.agent = read_agent(&mut table);
            table.finish();
        }
        if let Some(node) = fields.take("verifier") {
            config.verifier = read_verifier(&node);
        }
        if let Some(node) = fields.take("environment") {
            config.environment = read_environment(&node);
        }
        if let Some(mut table) = fields.take("solution").and_then(|n| n.fields()) {
            config.solution_env = take_env(&mut table);
            table.finish();
        }
        config.source = fields.take("source").and_then(|n| n.string());
        config.multi_step_reward_strategy =
            take_choice(&mut fields, "multi_step_reward_strategy", &["mean", "final"]);
        if let Some(items) = fields.take("steps").and_then(|n| n.list()) {
            config.steps = sections::read_steps(&items);
        }
        config.artifacts = sections::take_artifacts(&mut fields);
        fields.finish();
        config
    }
}

fn is_newer(version: &str) -> bool {
    let parts = |text: &str| {
        text.split('.')
            .map(|p| p.parse::<u32>().ok())
            .collect::<Option<Vec<_>>>()
    };
    parts(version) > parts(SCHEMA_VERSION)
}

/// A string that must be one of `choices`.
pub(super) fn take_choice(fields: &mut Fields<'_>, name: &'static str, choices: &[&str]) -> Option<String> {
    let node = fields.take(name)?;
    let text = node.string()?;
    if !choices.contains(&text.as_str()) {
        node.error(format!("is `{text}`; it must be one of: {}", choices.join(", ")));
    }
    Some(text)
}

pub(super) fn take_env(fields: &mut Fields<'_>) -> BTreeMap<String, String> {
    fields
        .take("env")
        .and_then(|n| n.string_map())
        .unwrap_or_default()
}

fn read_package(table: &mut Fields<'_>) -> PackageInfo {
    let mut package = PackageInfo::default();
    if let Some(node) = table.require("name") {
        if let Some(name) = node.string() {
            if !is_package_name(&name) {
                node.error(format!(
                    "is `{name}`; it must be `org/name` of letters, digits, `-`, `_` and `.`, \
                     each part starting with a letter or digit, without `..`"
                ));
            }
            package.name = name;
        }
    }
    if let Some(node) = table.take("version") {
        package.version = node.string();
        if package.version.as_deref() == Some("") {
            node.error("must not be empty");
        }
    }
    package.description = table
        .take("description")
        .and_then(|n| n.string())
        .unwrap_or_default();
    package.keywords = table
        .take("keywords")
        .and_then(|n| n.strings())
        .unwrap_or_default();
    for item in table.take("authors").and_then(|n| n.list()).unwrap_or_default() {
        if let Some(mut author) = item.fields() {
            let name = author
                .require("name")
                .and_then(|n| n.string())
                .unwrap_or_default();
            let email = author.take("email").and_then(|n| n.string());
            package.authors.push(Author { name, email });
            author.finish();
        }
    }
    package
}

fn is_package_name(name: &str) -> bool {
    let part = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))
    };
    !name.contains("..")
        && name
            .split_once('/')
            .is_some_and(|(org, short)| part(org) && part(short))
}

pub(super) fn read_agent(table: &mut Fields<'_>) -> AgentConfig {
    AgentConfig {
        timeout_sec: table.take("timeout_sec").and_then(|n| n.float()),
        user: table.take("user").and_then(|n| n.user()),
        network: take_policy(table, None),
    }
}

pub(super) fn read_verifier(node: &Node<'_>) -> VerifierConfig {
    let mut verifier = VerifierConfig::default();
    let Some(mut table) = node.fields() else {
        return verifier;
    };
    if let Some(seconds) = table.take("timeout_sec").and_then(|n| n.float()) {
        verifier.timeout_sec = seconds;
    }
    verifier.env = take_env(&mut table);
    verifier.user = table.take("user").and_then(|n| n.user());
    verifier.environment_mode = take_choice(&mut table, "environment_mode", &["shared", "separate"]);
    verifier.environment = table.take("environment").map(|n| read_environment(&n));
    if verifier.environment.is_some() && verifier.environment_mode.as_deref() == Some("shared") {
        table.error("has environment_mode = \"shared\" and an own environment; leave one of them out");
    }
    verifier.collect = sections::take_collect(&mut table);
    verifier.network = take_policy(&mut table, None);
    table.finish();
    verifier
}

fn read_environment(node: &Node<'_>) -> EnvironmentConfig {
    let mut environment = EnvironmentConfig::default();
    let Some(mut table) = node.fields() else {
        return environment;
    };
    if let Some(seconds) = table.take("build_timeout_sec").and_then(|n| n.float()) {
        environment.build_timeout_sec = seconds;
    }
    environment.docker_image = table.take("docker_image").and_then(|n| n.string());
    if let Some(node) = table.take("os") {
        if let Some(os) = node.string().map(|os| os.to_lowercase()) {
            if os != "linux" && os != "windows" {
                node.error(format!("is `{os}`; it must be linux or windows"));
            }
            environment.os = os;
        }
    }
    if let Some(node) = table.take("cpus") {
        environment.cpus = node.float();
        if environment.cpus.is_some_and(|cpus| !cpus.is_finite()) {
            node.error("must be a finite number");
        }
    }
    environment.memory_mb = take_size(&mut table, "memory_mb", "memory");
    environment.storage_mb = take_size(&mut table, "storage_mb", "storage");
    environment.gpus = table.take("gpus").and_then(|n| n.integer());
    environment.gpu_types = table
        .take("gpu_types")
        .and_then(|n| n.strings())
        .unwrap_or_default();
    environment.tpu = table.take("tpu").and_then(|n| sections::read_tpu(&n));
    environment.mcp_servers = sections::take_mcp_servers(&mut table);
    environment.env = take_env(&mut table);
    environment.skills_dir = table.take("skills_dir").and_then(|n| n.string());
    environment.healthcheck = table
        .take("healthcheck")
        .and_then(|n| sections::read_healthcheck(&n));
    environment.workdir = table.take("workdir").and_then(|n| n.string());
    // The old switch counts only where neither of the fields that replaced it is written.
    let explicit = table.has("network_mode") || table.has("allowed_hosts");
    environment.network = take_policy(&mut table, Some(NetworkMode::Public));
    if let Some(node) = table.take("allow_internet") {
        node.warn("is the old form of network_mode");
        if let (Some(allowed), false) = (node.boolean(), explicit) {
            environment.network.mode = Some(if allowed {
                NetworkMode::Public
            } else {
                NetworkMode::NoNetwork
            });
        }
    }
    table.finish();
    environment
}

/// A size in MiB, or its old form with a unit (`"2G"`).
fn take_size(table: &mut Fields<'_>, name: &'static str, old_name: &'static str) -> Option<i64> {
    let size = table.take(name).and_then(|n| n.integer());
    let Some(old) = table.take(old_name) else {
        return size;
    };
    old.warn(format!("is the old form of {name}"));
    if !old.is_string() {
        return size;
    }
    let text = old.string()?.trim().to_uppercase();
    let factor = match text.chars().last() {
        Some('G') => 1024.0,
        Some('M') => 1.0,
        Some('K') => 1.0 / 1024.0,
        _ => {
            old.error(format!("is `{text}`; it must be a number with G, M or K"));
            return size;
        }
    };
    match text[..text.len() - 1].trim().parse::<f64>() {
        Ok(number) if number.is_finite() => {
            let megabytes = (number * factor) as i64;
            if size.is_some_and(|size| size != megabytes) {
                old.error(format!("({megabytes} MiB) contradicts {name}"));
            }
            Some(megabytes)
        }
        _ => {
            old.error(format!("is `{text}`; it must be a number with G, M or K"));
            size
        }
    }
}
