//! Applies a task's `environment/Dockerfile` in a running sandbox, for backends that build no images.
//!
//! | Instruction | What happens |
//! |---|---|
//! | `FROM` | nothing: the sandbox's root takes its place |
//! | `WORKDIR`, `ENV`, `ARG`, `SHELL` | as docker does; build arguments have their defaults |
//! | `COPY`, `ADD` | files of the build context; `*` and `?` in names; no addresses, no archives |
//! | `RUN` | run in the sandbox, which has no network; a failure is an error |
//! | `CMD`, `ENTRYPOINT`, `EXPOSE`, `LABEL`, `STOPSIGNAL` | no effect: the image is not run |
//! | anything else | an error that names file and line |

mod parse;

pub use parse::{parse, Instruction, Line, ParseError, Words};

use super::{ExecSpec, Sandbox, SandboxError};
use crate::base::files;
use parse::expand;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// What commands of the task start with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// `ENV` of the Dockerfile.
    pub env: BTreeMap<String, String>,
    /// Last `WORKDIR`.
    pub workdir: Option<String>,
}

/// Applies `Dockerfile` of the folder; without one there is nothing to do.
pub async fn apply(environment: &Path, sandbox: &dyn Sandbox) -> Result<Image, SandboxError> {
    let file = environment.join("Dockerfile");
    let text = match files::read_text(&file) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && environment.is_dir() => {
            return Ok(Image::default())
        }
        Err(e) => return Err(SandboxError::io("read", file, e)),
    };
    let at = |line: usize, problem: String| SandboxError::Dockerfile {
        file: file.clone(),
        line,
        problem,
    };
    if environment.join(".dockerignore").exists() {
        return Err(at(1, "a .dockerignore file is not supported in a sandbox".into()));
    }
    let lines = parse(&text).map_err(|e| at(e.number, e.problem))?;
    let mut build = Build {
        context: environment,
        sandbox,
        image: Image::default(),
        arguments: BTreeMap::new(),
        shell: vec!["/bin/sh".into(), "-c".into()],
    };
    for line in lines {
        match build.step(line.instruction).await {
            Ok(()) => {}
            Err(Step::Problem(problem)) => return Err(at(line.number, problem)),
            Err(Step::Sandbox(error)) => return Err(error),
        }
    }
    Ok(build.image)
}

struct Build<'a> {
    context: &'a Path,
    sandbox: &'a dyn Sandbox,
    image: Image,
    arguments: BTreeMap<String, String>,
    shell: Vec<String>,
}

/// Why a step failed.
enum Step {
    /// The line cannot be applied.
    Problem(String),
    /// The sandbox failed.
    Sandbox(SandboxError),
}

impl From<SandboxError> for Step {
    fn from(error: SandboxError) -> Self {
        match error {
            SandboxError::Refused { action, problem, .. } => Step::Problem(format!("{action}: {problem}")),
            other => Step::Sandbox(other),
        }
    }
}

impl From<String> for Step {
    fn from(problem: String) -> Self {
        Step::Problem(problem)
    }
}

impl Build<'_> {
    async fn step(&mut self, instruction: Instruction) -> Result<(), Step> {
        match instruction {
            Instruction::From(image) => {
                tracing::debug!(%image, "the sandbox's own root takes the place of the base image");
            }
            Instruction::NoEffect => {}
            Instruction::Arg(name, default) => {
                if let Some(default) = default {
                    let value = self.expand(&default)?;
                    self.arguments.insert(name, value);
                }
            }
            Instruction::Env(pairs) => {
                // All values see the environment as it was before the line.
                let values: Vec<_> = pairs
                    .into_iter()
                    .map(|(name, value)| Ok((name, self.expand(&value)?)))
                    .collect::<Result<_, String>>()?;
                self.image.env.extend(values);
            }
            Instruction::Workdir(path) => {
                let path = self.resolve(&self.expand(&path)?);
                self.sandbox.make_dir(&path).await?;
                self.image.workdir = Some(path);
            }
            Instruction::Shell(words) => self.shell = words,
            Instruction::Run(words) => self.run(words).await?,
            Instruction::Copy { sources, target } => self.copy(&sources, &target).await?,
        }
        Ok(())
    }

    fn expand(&self, text: &str) -> Result<String, String> {
        let mut variables = self.arguments.clone();
        variables.extend(self.image.env.clone());
        expand(text, &variables)
    }

    /// An absolute path: relative ones begin at the working directory.
    fn resolve(&self, path: &str) -> String {
        if path.starts_with('/') {
            return path.into();
        }
        let base = self.image.workdir.as_deref().unwrap_or("/").trim_end_matches('/');
        let relative = path.trim_start_matches("./");
        match relative {
            "" | "." => {
                if base.is_empty() {
                    "/".into()
                } else {
                    base.into()
                }
            }
            _ => format!("{base}/{relative}"),
        }
    }

    async fn run(&self, words: Words) -> Result<(), Step> {
        let argv = match words {
            Words::Exec(argv) => argv,
            Words::Shell(text) => self.shell.iter().cloned().chain([text]).collect(),
        };
        let mut spec = ExecSpec::new(argv);
        spec.env = self.arguments.clone();
        spec.env.extend(self.image.env.clone());
        spec.cwd = Some(self.image.workdir.clone().unwrap_or_else(|| "/".into()));
        let result = self.sandbox.exec(spec).await?;
        if result.success() {
            return Ok(());
        }
        let how = match (result.exit_code, result.signal) {
            (Some(code), _) => format!("ended with status {code}"),
            (None, Some(signal)) => format!("was killed by signal {signal}"),
            (None, None) => "did not end".into(),
        };
        let limit = if result.oom_killed { " (out of memory)" } else { "" };
        let from = result
            .tail
            .char_indices()
            .rev()
            .take(2000)
            .last()
            .map_or(0, |(at, _)| at);
        Err(Step::Problem(format!(
            "RUN {how}{limit}: {}",
            result.tail[from..].trim()
        )))
    }

    async fn copy(&self, sources: &[String], target: &str) -> Result<(), Step> {
        let target = self.expand(target)?;
        let mut files = Vec::new();
        for source in sources {
            files.extend(self.find(&self.expand(source)?)?);
        }
        let path = self.resolve(&target);
        let into_folder = target.ends_with('/') || target.ends_with('.') || self.is_folder(&path).await?;
        if files.len() > 1 && !into_folder {
            return Err(Step::Problem(format!(
                "{} files into `{target}`: the target of several files must end in `/`",
                files.len()
            )));
        }
        for file in files {
            let name = file.file_name().map(|n| n.to_string_lossy().into_owned());
            match name {
                // A folder gives its content.
                Some(name) if into_folder && !file.is_dir() => {
                    let remote = format!("{}/{name}", path.trim_end_matches('/'));
                    self.sandbox.upload(&file, &remote).await?;
                }
                _ => self.sandbox.upload(&file, &path).await?,
            }
        }
        Ok(())
    }

    async fn is_folder(&self, path: &str) -> Result<bool, Step> {
        let test = ExecSpec::new(["/bin/sh", "-c", "test -d \"$1\"", "sh", path]);
        Ok(self.sandbox.exec(test).await?.success())
    }

    /// The files of the context that a source names; wildcards match within a folder.
    fn find(&self, source: &str) -> Result<Vec<PathBuf>, String> {
        let relative = source.trim_start_matches('/');
        let mut found = vec![self.context.to_path_buf()];
        for part in Path::new(relative).components() {
            let name = match part {
                Component::CurDir => continue,
                Component::Normal(name) => name.to_string_lossy(),
                _ => return Err(format!("COPY of `{source}` leads out of the build context")),
            };
            found = match name.contains(['*', '?']) {
                false => found.into_iter().map(|dir| dir.join(&*name)).collect(),
                true => {
                    let mut all = Vec::new();
                    for dir in found {
                        let entries = fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
                        let names = entries
                            .flatten()
                            .filter(|e| matches(&name, &e.file_name().to_string_lossy()));
                        all.extend(names.map(|e| e.path()));
                    }
                    all.sort();
                    all
                }
            };
        }
        found.retain(|p| p.exists());
        if found.is_empty() {
            return Err(format!(
                "COPY: `{source}` is not in the build context `{}`",
                self.context.display()
            ));
        }
        Ok(found)
    }
}

/// `*` is any text, `?` one character.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.chars().next() {
        None => name.is_empty(),
        Some('*') => (0..=name.len())
            .filter(|&i| name.is_char_boundary(i))
            .any(|i| matches(&pattern[1..], &name[i..])),
        Some(p) => name.chars().next().is_some_and(|n| {
            (p == '?' || p == n) && matches(&pattern[p.len_utf8()..], &name[n.len_utf8()..])
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn wildcards_match_like_a_shell() {
        for (pattern, name, want) in [
            ("*.py", "a.py", true),
            ("*.py", "a.pyc", false),
            ("?x*", "äxyz", true),
            ("*", "", true),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "a1c2b", false),
        ] {
            assert_eq!(matches(pattern, name), want, "{pattern} {name}");
        }
    }
}
