//! Reads a Dockerfile into instructions with their lines.

use std::collections::BTreeMap;

/// An instruction and the line on which it begins, from 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Line.
    pub number: usize,
    /// What it says.
    pub instruction: Instruction,
}

/// What can be applied in a sandbox that exists already.
#[derive(Clone, Debug, PartialEq)]
pub enum Instruction {
    /// Base image; the sandbox's own root takes its place.
    From(String),
    /// Working directory, variables not yet replaced.
    Workdir(String),
    /// Variables, values not yet replaced.
    Env(Vec<(String, String)>),
    /// Build argument with its default.
    Arg(String, Option<String>),
    /// Files of the build context, and where they go.
    Copy {
        /// Sources relative to the context.
        sources: Vec<String>,
        /// Target.
        target: String,
    },
    /// A command.
    Run(Words),
    /// Shell of later `RUN` lines.
    Shell(Vec<String>),
    /// Says something about running the image, which a sandbox does not do.
    NoEffect,
}

/// Shell form or exec form.
#[derive(Clone, Debug, PartialEq)]
pub enum Words {
    /// One text for the shell.
    Shell(String),
    /// Program and arguments.
    Exec(Vec<String>),
}

/// A line that cannot be applied.
#[derive(Clone, Debug, PartialEq)]
pub struct ParseError {
    /// Line, from 1.
    pub number: usize,
    /// What is wrong.
    pub problem: String,
}

/// All instructions of a Dockerfile.
pub fn parse(text: &str) -> Result<Vec<Line>, ParseError> {
    let mut lines = Vec::new();
    for (number, logical) in logical_lines(text)? {
        let fail = |problem: String| ParseError { number, problem };
        let (word, rest) = logical.split_once(char::is_whitespace).unwrap_or((&logical, ""));
        let instruction = instruction(&word.to_ascii_uppercase(), rest.trim()).map_err(fail)?;
        if matches!(instruction, Instruction::From(_))
            && lines
                .iter()
                .any(|l: &Line| matches!(l.instruction, Instruction::From(_)))
        {
            return Err(fail(
                "a second build stage (FROM) is not supported in a sandbox".into(),
            ));
        }
        lines.push(Line { number, instruction });
    }
    Ok(lines)
}

/// Joins continued lines; comments and blank lines within them are left out.
fn logical_lines(text: &str) -> Result<Vec<(usize, String)>, ParseError> {
    let mut lines = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (index, raw) in text.lines().enumerate() {
        let (number, trimmed) = (index + 1, raw.trim());
        if let Some(comment) = trimmed.strip_prefix('#') {
            let directive = comment.trim().to_ascii_lowercase().replace(' ', "");
            if lines.is_empty()
                && open.is_none()
                && directive.starts_with("escape=")
                && directive != "escape=\\"
            {
                return Err(ParseError {
                    number,
                    problem: "another escape character than `\\` is not supported".into(),
                });
            }
            continue;
        }
        if trimmed.is_empty() {
            continue;
        }
        let (begin, mut logical) = open.take().unwrap_or((number, String::new()));
        match raw.trim_end().strip_suffix('\\') {
            Some(part) => {
                logical.push_str(if logical.is_empty() {
                    part.trim_start()
                } else {
                    part
                });
                open = Some((begin, logical));
            }
            None => {
                logical.push_str(if logical.is_empty() {
                    trimmed
                } else {
                    raw.trim_end()
                });
                lines.push((begin, logical));
            }
        }
    }
    lines.extend(open.filter(|(_, text)| !text.trim().is_empty()));
    Ok(lines)
}

fn instruction(word: &str, rest: &str) -> Result<Instruction, String> {
    if rest.is_empty() {
        return Err(format!("{word} without an argument"));
    }
    match word {
        "FROM" => Ok(Instruction::From(rest.to_string())),
        "WORKDIR" => Ok(Instruction::Workdir(unquote(rest))),
        "ENV" => env(rest),
        "ARG" => Ok(match rest.split_once('=') {
            Some((name, value)) => Instruction::Arg(name.trim().into(), Some(unquote(value.trim()))),
            None => Instruction::Arg(rest.into(), None),
        }),
        "COPY" | "ADD" => copy(word, rest),
        "RUN" if rest.starts_with("--") => Err("options of RUN are not supported in a sandbox".into()),
        "RUN" if heredoc(rest) => Err("here-documents are not supported in a sandbox".into()),
        "RUN" => Ok(Instruction::Run(match json_list(rest) {
            Some(words) => Words::Exec(words),
            None => Words::Shell(rest.to_string()),
        })),
        "SHELL" => match json_list(rest) {
            Some(words) if !words.is_empty() => Ok(Instruction::Shell(words)),
            _ => Err("SHELL takes a JSON list".into()),
        },
        "USER" if ["root", "0", "root:root", "0:0"].contains(&rest) => Ok(Instruction::NoEffect),
        "CMD" | "ENTRYPOINT" | "EXPOSE" | "LABEL" | "MAINTAINER" | "STOPSIGNAL" => Ok(Instruction::NoEffect),
        other => Err(format!("{other} is not supported in a sandbox")),
    }
}

/// `<<EOF` as docker understands it: at the start of a word, not the shell's own `$((1<<2))`.
fn heredoc(rest: &str) -> bool {
    rest.split_whitespace().any(|w| {
        let tag = w
            .strip_prefix("<<")
            .map(|t| t.trim_start_matches('-').trim_matches(['"', '\'']));
        tag.is_some_and(|t| t.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_'))
    })
}

fn json_list(rest: &str) -> Option<Vec<String>> {
    rest.starts_with('[')
        .then(|| serde_json::from_str(rest).ok())
        .flatten()
}

fn copy(word: &str, rest: &str) -> Result<Instruction, String> {
    let words = json_list(rest).map_or_else(|| split_words(rest), Ok)?;
    let mut paths = Vec::new();
    for path in words {
        match path.strip_prefix("--") {
            // The sandbox has one user, to whom everything belongs.
            Some(option)
                if ["chown=root", "chown=root:root", "chown=0", "chown=0:0", "link"].contains(&option) => {}
            Some(_) => return Err(format!("{word} {path} is not supported in a sandbox")),
            None => paths.push(path),
        }
    }
    let target = paths.pop().filter(|_| !paths.is_empty());
    let target = target.ok_or_else(|| format!("{word} needs a source and a target"))?;
    if word == "ADD" {
        let archive = [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zst"];
        if let Some(bad) = paths
            .iter()
            .find(|p| p.contains("://") || p.starts_with("git@") || archive.iter().any(|a| p.ends_with(a)))
        {
            return Err(format!(
                "ADD of `{bad}` (an address or an archive) is not supported in a sandbox"
            ));
        }
    }
    if heredoc(rest) {
        return Err("here-documents are not supported in a sandbox".into());
    }
    Ok(Instruction::Copy {
        sources: paths,
        target,
    })
}

/// `ENV a=b c="d e"`, or the old form `ENV a everything else`.
fn env(rest: &str) -> Result<Instruction, String> {
    let first = rest.split_whitespace().next().unwrap_or_default();
    if !first.contains('=') {
        let (name, value) = rest
            .split_once(char::is_whitespace)
            .ok_or_else(|| format!("ENV {rest} has no value"))?;
        return Ok(Instruction::Env(vec![(name.into(), value.trim().into())]));
    }
    let pairs = split_words(rest)?
        .into_iter()
        .map(|word| match word.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok((name.to_string(), value.to_string())),
            _ => Err(format!("ENV: `{word}` is not name=value")),
        })
        .collect::<Result<_, _>>()?;
    Ok(Instruction::Env(pairs))
}

/// Splits at spaces outside of quotes; quotes are removed and `\x` becomes `x`, except before `$`, which
/// is still to be seen by [`expand`].
fn split_words(text: &str) -> Result<Vec<String>, String> {
    let (mut words, mut word, mut begun, mut quote) = (Vec::new(), String::new(), false, None);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, quote) {
            ('\\', None | Some('"')) => match chars.next() {
                Some('$') => word.push_str("\\$"),
                Some(next) => word.push(next),
                None => word.push('\\'),
            },
            (c, Some(q)) if c == q => quote = None,
            ('"' | '\'', None) => (begun, quote) = (true, Some(c)),
            // Nothing is replaced inside single quotes.
            ('$', Some('\'')) => word.push_str("\\$"),
            (c, None) if c.is_whitespace() => {
                if begun || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                begun = false;
            }
            (c, _) => word.push(c),
        }
    }
    if let Some(quote) = quote {
        return Err(format!("no closing {quote}"));
    }
    if begun || !word.is_empty() {
        words.push(word);
    }
    Ok(words)
}

fn unquote(text: &str) -> String {
    match split_words(text) {
        Ok(words) if words.len() == 1 => words.concat(),
        _ => text.to_string(),
    }
}

/// Replaces `$NAME`, `${NAME}`, `${NAME:-default}` and `${NAME:+other}`; an unset name is empty.
pub fn expand(text: &str, variables: &BTreeMap<String, String>) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['$', '\\']) {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if rest[at..].starts_with('\\') {
            let escaped = after.starts_with('$');
            out.push_str(if escaped { "$" } else { "\\" });
            rest = if escaped { &after[1..] } else { after };
        } else if let Some(inner) = after.strip_prefix('{') {
            let end = inner
                .find('}')
                .ok_or_else(|| format!("no closing brace in `{text}`"))?;
            out.push_str(&braces(&inner[..end], variables)?);
            rest = &inner[end + 1..];
        } else {
            let end = after.find(|c: char| !is_name(c)).unwrap_or(after.len());
            match &after[..end] {
                "" => out.push('$'),
                name => out.push_str(variables.get(name).map_or("", String::as_str)),
            }
            rest = &after[end..];
        }
    }
    Ok(out + rest)
}

fn braces(inner: &str, variables: &BTreeMap<String, String>) -> Result<String, String> {
    let end = inner.find(|c: char| !is_name(c)).unwrap_or(inner.len());
    let (name, rule) = inner.split_at(end);
    let value = variables.get(name).filter(|v| !v.is_empty());
    match rule.get(..2) {
        _ if rule.is_empty() => Ok(value.cloned().unwrap_or_default()),
        Some(":-") => value.cloned().map_or_else(|| expand(&rule[2..], variables), Ok),
        Some(":+") => value.map_or_else(|| Ok(String::new()), |_| expand(&rule[2..], variables)),
        _ => Err(format!("`${{{inner}}}` is not supported in a sandbox")),
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str) -> Instruction {
        Instruction::Run(Words::Shell(text.into()))
    }

    #[test]
    fn instructions_continue_over_lines_and_keep_their_number() {
        let text = "# syntax=docker/dockerfile:1\nFROM debian:12 AS base\n\nworkdir /app\n\
                    RUN echo a && \\\n    # why\n\n    echo b\nRUN [\"touch\", \"/x y\"]\nCMD [\"sleep\"]\n";
        let lines = parse(text).unwrap();
        let numbers: Vec<usize> = lines.iter().map(|l| l.number).collect();
        assert_eq!(numbers, [2, 4, 5, 9, 10]);
        assert_eq!(lines[1].instruction, Instruction::Workdir("/app".into()));
        assert_eq!(lines[2].instruction, run("echo a &&     echo b"));
        assert_eq!(
            lines[3].instruction,
            Instruction::Run(Words::Exec(vec!["touch".into(), "/x y".into()]))
        );
        assert_eq!(lines[4].instruction, Instruction::NoEffect);
    }

    #[test]
    fn quotes_and_variables_follow_the_reference() {
        let pairs = |text: &str| match parse(text).unwrap().remove(0).instruction {
            Instruction::Env(pairs) => pairs,
            other => panic!("{other:?}"),
        };
        let own = |a: &str, b: &str| (a.to_string(), b.to_string());
        assert_eq!(
            pairs(r#"ENV A="x y" B=z\ w C='$D' E="#),
            [own("A", "x y"), own("B", "z w"), own("C", "\\$D"), own("E", "")]
        );
        assert_eq!(pairs("ENV A b c"), [own("A", "b c")]);
        let variables = BTreeMap::from([own("A", "1"), own("EMPTY", "")]);
        for (text, want) in [
            ("$A-${A}b$", "1-1b$"),
            ("\\$A \\n", "$A \\n"),
            ("${NO:-d$A}${A:-x}${EMPTY:-e}", "d11e"),
            ("${A:+set}${NO:+set}$NO", "set"),
        ] {
            assert_eq!(expand(text, &variables).as_deref(), Ok(want), "{text}");
        }
        assert!(expand("${A%x}", &variables).is_err() && expand("${A", &variables).is_err());
    }

    #[test]
    fn what_cannot_be_applied_is_refused_with_its_line() {
        for (text, word) in [
            ("FROM a\nFROM b", "second build stage"),
            ("FROM a\nHEALTHCHECK CMD true", "HEALTHCHECK"),
            ("FROM a\nRUN --mount=type=cache true", "options of RUN"),
            ("FROM a\nRUN cat <<EOF > /x", "here-documents"),
            ("FROM a\nCOPY --from=b /x /y", "--from=b"),
            ("FROM a\nADD https://x/y /z", "https://x/y"),
            ("FROM a\nUSER app", "USER"),
            ("FROM a\nCOPY x", "a source and a target"),
            ("FROM a\nENV A=\"b", "no closing"),
            ("FROM a\nWORKDIR", "without an argument"),
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.number, 2, "{text}");
            assert!(error.problem.contains(word), "{text}: {}", error.problem);
        }
        assert_eq!(parse("# escape=`\nFROM a").unwrap_err().number, 1);
        // A shift is not a here-document.
        assert!(parse("FROM a\nRUN echo $((1 << 2)) $((1<<3))").is_ok());
    }
}
