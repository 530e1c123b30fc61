//! The checkpoint's own chat template, rendered as transformers renders it.
//!
//! A template is Jinja. transformers runs it in a sandboxed Jinja2 with `trim_blocks`, `lstrip_blocks`,
//! a `tojson` that writes like Python's `json.dumps(ensure_ascii=False)`, `raise_exception` and
//! `strftime_now`; this module gives minijinja the same. `{% generation %}` blocks, by which training
//! frameworks mark the assistant's text, render as what they enclose. One difference remains:
//! `strftime_now` is in UTC.
//!
//! [`ChatTemplate::render`] takes OpenAI messages. Before rendering, [`normalize`] brings them to the
//! one form that templates agree on: text content as a string (a list of text parts is joined, null is
//! the empty string) and tool-call arguments as a mapping.

mod date;
mod normalize;
#[cfg(test)]
mod tests;
mod tojson;

pub use normalize::{normalize, MessageError};

use minijinja::{value::Kwargs, AutoEscape, Environment, Error, ErrorKind, Value as JinjaValue};
use serde_json::{Map, Value};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

/// A template that cannot be used, or messages that it does not take.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// Neither file holds a template.
    #[error("no chat template: `{dir}` has neither chat_template.jinja nor a `chat_template` in tokenizer_config.json")]
    Missing {
        /// Model folder.
        dir: PathBuf,
    },
    /// A file is missing or unreadable.
    #[error("cannot read `{path}`: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The template does not compile.
    #[error("chat template `{origin}`: {problem}")]
    Compile {
        /// File that holds it.
        origin: String,
        /// What is wrong, with the line.
        problem: String,
    },
    /// The template raised an exception of its own: the conversation has a form that it forbids.
    #[error("the chat template refuses these messages: {0}")]
    Raised(String),
    /// Rendering failed.
    #[error("chat template `{origin}`: {problem}")]
    Render {
        /// File that holds it.
        origin: String,
        /// What is wrong, with the line.
        problem: String,
    },
    /// Rendering does not come to an end.
    #[error(
        "chat template `{origin}`: rendering {messages} messages takes more than {MAX_STEPS} steps of the template; \
         look for a loop in it that never ends"
    )]
    Endless {
        /// File that holds it.
        origin: String,
        /// Messages that were to be rendered.
        messages: usize,
    },
    /// A message has a form that no template takes.
    #[error(transparent)]
    Message(#[from] MessageError),
}

/// See the module documentation.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    origin: String,
    named_tokens: HashMap<String, String>,
}

const NAME: &str = "chat_template";

/// Steps (instructions of the template engine) that one rendering may take. Qwen3's template takes 118 a message,
/// so that no conversation comes near; a loop without an end is stopped in a second or two.
const MAX_STEPS: u64 = 10_000_000;

/// A list of tools as templates take it; made once for many renderings.
#[derive(Debug)]
pub struct Tools(JinjaValue);

impl Tools {
    /// From OpenAI form; an empty list is none.
    pub fn new(list: &[Value]) -> Self {
        Self(if list.is_empty() {
            JinjaValue::from(())
        } else {
            JinjaValue::from_serialize(list)
        })
    }
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, or else `chat_template` of `tokenizer_config.json` (a string, or a
    /// list of named ones of which `default` counts).
    pub fn from_dir(dir: &Path) -> Result<Self, TemplateError> {
        let config_path = dir.join("tokenizer_config.json");
        let config: Value = match crate::base::files::read(&config_path) {
            Ok(data) => serde_json::from_slice(&data).map_err(|error| TemplateError::Compile {
                origin: config_path.display().to_string(),
                problem: format!("not JSON: {error}"),
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Value::Null,
            Err(source) => {
                return Err(TemplateError::Read {
                    path: config_path,
                    source,
                })
            }
        };
        let mut named_tokens = HashMap::new();
        for (key, value) in config.as_object().into_iter().flatten() {
            let text = value.as_str().or_else(|| value["content"].as_str());
            if let (true, Some(text)) = (key.ends_with("_token"), text) {
                named_tokens.insert(key.clone(), text.to_owned());
            }
        }
        let path = dir.join("chat_template.jinja");
        match crate::base::files::read_text(&path) {
            Ok(source) => return Self::from_source(source, &path.display().to_string(), named_tokens),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => return Err(TemplateError::Read { path, source }),
        }
        let source = match &config["chat_template"] {
            Value::String(text) => Some(text.clone()),
            Value::Array(list) => list
                .iter()
                .find(|entry| entry["name"] == "default")
                .and_then(|entry| entry["template"].as_str().map(str::to_owned)),
            _ => None,
        };
        match source {
            Some(source) => Self::from_source(source, &config_path.display().to_string(), named_tokens),
            None => Err(TemplateError::Missing { dir: dir.to_owned() }),
        }
    }

    /// Compiles a template. `origin` names it in errors; `named_tokens` are `bos_token` and the like.
    pub fn from_source(
        source: String,
        origin: &str,
        named_tokens: HashMap<String, String>,
    ) -> Result<Self, TemplateError> {
        let compile_error = |problem: String| TemplateError::Compile {
            origin: origin.to_owned(),
            problem,
        };
        let mut environment = Environment::new();
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson::tojson);
        // minijinja calls none iterable; Python does not, and templates guard `tools` with it.
        environment.add_test("iterable", |value: &JinjaValue| {
            !value.is_none() && value.try_iter().is_ok()
        });
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<JinjaValue, Error> {
                Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("{RAISED}{message}"),
                ))
            },
        );
        environment.add_function("strftime_now", |format: String| {
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0, |d| d.as_secs());
            date::strftime(&format, now)
        });
        environment
            .add_template_owned(NAME, without_generation_tags(&source))
            .map_err(|error| compile_error(describe(&error)))?;
        Ok(Self {
            environment,
            source,
            origin: origin.to_owned(),
            named_tokens,
        })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders messages (OpenAI form) to the prompt text. `tools` is the request's list, `None` or
    /// empty for none. With `add_generation_prompt` the text ends where the assistant begins.
    pub fn render(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        self.render_with(messages, tools, add_generation_prompt, &Map::new())
    }

    /// [`ChatTemplate::render`] with further variables (`chat_template_kwargs`), for example
    /// `enable_thinking`.
    pub fn render_with(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        let tools = Tools::new(tools.unwrap_or_default());
        self.render_tools(messages, &tools, add_generation_prompt, variables)
    }

    /// [`ChatTemplate::render_with`] with tools that were made before.
    pub fn render_tools(
        &self,
        messages: &[Value],
        tools: &Tools,
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        let messages = messages.iter().map(normalize).collect::<Result<Vec<_>, _>>()?;
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| self.failed(&error, messages.len()))?;
        let mut context: HashMap<&str, JinjaValue> = HashMap::new();
        for (name, text) in &self.named_tokens {
            context.insert(name, JinjaValue::from(text.as_str()));
        }
        for (name, value) in variables {
            context.insert(name, JinjaValue::from_serialize(value));
        }
        context.insert("messages", JinjaValue::from_serialize(&messages));
        context.insert("tools", tools.0.clone());
        context.insert("documents", JinjaValue::from(()));
        context.insert("add_generation_prompt", JinjaValue::from(add_generation_prompt));
        let rendered = template.render(context);
        rendered.map_err(|error| self.failed(&error, messages.len()))
    }

    fn failed(&self, error: &Error, messages: usize) -> TemplateError {
        let origin = self.origin.clone();
        let text = error.detail().unwrap_or_default();
        match text.strip_prefix(RAISED) {
            Some(message) => TemplateError::Raised(message.to_owned()),
            None if error.kind() == ErrorKind::OutOfFuel => TemplateError::Endless { origin, messages },
            None => TemplateError::Render {
                origin,
                problem: describe(error),
            },
        }
    }
}

/// Tells an exception of the template from a failure of rendering.
const RAISED: &str = "raise_exception: ";

/// `{% generation %}` becomes a block that is always rendered; whitespace control is kept.
fn without_generation_tags(source: &str) -> String {
    let source = source.replace("\r\n", "\n"); // Jinja2 does so when it compiles
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else {
            break;
        };
        let tag = &rest[start + 2..start + length];
        let word = tag.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        out.push_str(&rest[..start + 2]);
        match word {
            "generation" => out.push_str(&tag.replace(word, "if true")),
            "endgeneration" => out.push_str(&tag.replace(word, "endif")),
            _ => out.push_str(tag),
        }
        rest = &rest[start + length..];
    }
    out + rest
}

fn describe(error: &Error) -> String {
    let line = error
        .line()
        .map_or(String::new(), |line| format!("line {line}: "));
    format!("{line}{error}")
}

/// Ignored keyword arguments are errors, as in Python.
fn finish(kwargs: &Kwargs) -> Result<(), Error> {
    kwargs.assert_all_used()
}
