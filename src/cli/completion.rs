//! Shell completion. `legorl-rank completion SHELL` prints a few lines for the shell's start file; they ask
//! the program itself for candidates (`legorl-rank complete LINE`, hidden), which it takes from the
//! definition of its command line and from the table of variables. So completion never lags behind.
//!
//! `complete` gets the command line up to the cursor and prints one candidate a line; the line
//! `:files` asks the shell for file names.

use crate::{
    config::variables::{self, Kind},
    preflight::rules,
};
use clap::{Args, Command, ValueEnum};
use std::process::ExitCode;

/// Answer that asks for file names.
const FILES: &str = ":files";

/// Arguments of `completion`.
#[derive(Args)]
pub struct CompletionArgs {
    /// Shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Shells with completion.
#[derive(Clone, Copy, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Arguments of `complete`.
#[derive(Args)]
pub struct CompleteArgs {
    /// Command line up to the cursor
    line: String,
}

/// Prints the lines for the shell.
pub fn script(args: &CompletionArgs) -> ExitCode {
    super::print(match args.shell {
        Shell::Bash => BASH,
        Shell::Zsh => ZSH,
        Shell::Fish => FISH,
    });
    ExitCode::SUCCESS
}

/// Prints candidates.
pub fn complete(args: &CompleteArgs, program: &Command) -> ExitCode {
    let lines: Vec<String> = candidates(program, &args.line)
        .into_iter()
        .map(|candidate| candidate + "\n")
        .collect();
    super::print(&lines.concat());
    ExitCode::SUCCESS
}

// Bash cuts words at `=`, so what it replaces is only the part behind it.
const BASH: &str = r#"# bash: eval "$(legorl-rank completion bash)"
_legorl_rank() {
  local IFS=$'\n' word=${COMP_LINE:0:COMP_POINT}
  word=${word##* }
  COMPREPLY=($(legorl-rank complete "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
  if [[ ${COMPREPLY[0]-} == :files ]]; then
    COMPREPLY=()
    compopt -o default -o filenames 2>/dev/null
  elif [[ $word == *=* ]]; then
    COMPREPLY=("${COMPREPLY[@]#*=}")
  elif [[ ${COMPREPLY[0]-} == *= ]]; then
    compopt -o nospace 2>/dev/null
  fi
}
complete -F _legorl_rank legorl-rank
"#;

const ZSH: &str = r#"# zsh: eval "$(legorl-rank completion zsh)", after compinit
_legorl_rank() {
  local -a found
  found=("${(@f)$(legorl-rank complete "${LBUFFER}" 2>/dev/null)}")
  if [[ $found[1] == :files ]]; then
    _files
  else
    compadd -S '' -a -- found
  fi
}
compdef _legorl_rank legorl-rank
"#;

const FISH: &str = r#"# fish: legorl-rank completion fish | source
function __legorl_rank
    set -l found (legorl-rank complete (commandline -cp | string collect) 2>/dev/null)
    if test "$found[1]" = :files
        __fish_complete_path (commandline -ct)
    else
        printf '%s\n' $found
    end
end
complete -c legorl-rank -f -a '(__legorl_rank)'
"#;

/// What may stand at the end of `line`.
fn candidates(program: &Command, line: &str) -> Vec<String> {
    let mut words: Vec<&str> = line.split_whitespace().skip(1).collect();
    // After a blank a new word begins.
    let current = if line.ends_with(char::is_whitespace) || words.is_empty() {
        ""
    } else {
        words.pop().unwrap_or_default()
    };
    let starts = |all: Vec<String>| -> Vec<String> {
        let mut found: Vec<String> = all.into_iter().filter(|c| c.starts_with(current)).collect();
        found.dedup();
        found
    };
    let (command, positions) = descend(program, &words);
    if let Some(option) = words.last().and_then(|word| option_of(command, word)) {
        return match option.get_id().as_str() {
            "set" => starts(assignments(current)),
            _ => {
                let values: Vec<String> = option
                    .get_possible_values()
                    .iter()
                    .map(|v| v.get_name().to_owned())
                    .collect();
                if values.is_empty() {
                    vec![FILES.into()]
                } else {
                    starts(values)
                }
            }
        };
    }
    if current.starts_with('-') {
        let longs = command.get_arguments().filter_map(|arg| arg.get_long());
        return starts(
            longs
                .map(|long| format!("--{long}"))
                .chain(["--help".into()])
                .collect(),
        );
    }
    let mut found: Vec<String> = command
        .get_subcommands()
        .filter(|sub| !sub.is_hide_set())
        .map(|sub| sub.get_name().to_owned())
        .collect();
    if let Some(positional) = command.get_positionals().nth(positions) {
        match positional.get_id().as_str() {
            "rule" => found.extend(rules::ALL.iter().map(|rule| rule.id.to_owned())),
            _ => found.extend(
                positional
                    .get_possible_values()
                    .iter()
                    .map(|v| v.get_name().to_owned()),
            ),
        }
    }
    let found = starts(found);
    // `legorl-rank CONFIG` is short for `train CONFIG`.
    if found.is_empty() {
        vec![FILES.into()]
    } else {
        found
    }
}

/// The command that `words` lead to, and how many positional arguments it has already.
fn descend<'a>(program: &'a Command, words: &[&str]) -> (&'a Command, usize) {
    let (mut command, mut positions) = (program, 0);
    let mut takes_value = false;
    for word in words {
        if std::mem::take(&mut takes_value) {
            continue;
        }
        if word.starts_with('-') {
            let in_train = program.find_subcommand("train");
            takes_value = option_of(command, word).is_some();
            // A flag of `train` before any command: the command is left out.
            if std::ptr::eq(command, program) && !takes_value {
                if let Some(train) = in_train {
                    takes_value = option_of(train, word).is_some();
                    command = train;
                }
            }
        } else if let Some(sub) = command.find_subcommand(word) {
            (command, positions) = (sub, 0);
        } else {
            if std::ptr::eq(command, program) {
                command = program.find_subcommand("train").unwrap_or(program);
            }
            positions += 1;
        }
    }
    (command, positions)
}

/// The option that this word is, if a value follows it.
fn option_of<'a>(command: &'a Command, word: &str) -> Option<&'a clap::Arg> {
    let name = word.strip_prefix("--")?;
    command
        .get_arguments()
        .find(|arg| arg.get_long() == Some(name) && arg.get_action().takes_values())
}

/// `NAME=` for every variable, and after it the values that the table lists.
fn assignments(current: &str) -> Vec<String> {
    let Some((name, _)) = current.split_once('=') else {
        return variables::all()
            .map(|variable| format!("{}=", variable.name))
            .collect();
    };
    let values: Vec<&str> = match variables::find(variables::canonical(name)).map(|variable| variable.kind) {
        Some(Kind::Choice(names)) => names.to_vec(),
        Some(Kind::Bool) => vec!["True", "False"],
        _ => Vec::new(),
    };
    values
        .into_iter()
        .map(|value| format!("{name}={value}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(line: &str) -> Vec<String> {
        candidates(&crate::cli::definition(), line)
    }

    #[test]
    fn commands_options_and_files() {
        assert!(at("legorl-rank ").contains(&"config".to_owned()));
        assert_eq!(at("legorl-rank conf"), ["config"]);
        assert_eq!(at("legorl-rank config "), ["show", "reference", "help"]);
        assert_eq!(at("legorl-rank train --struct"), ["--structure-only"]);
        assert_eq!(at("legorl-rank configs/de"), [FILES]);
        assert_eq!(at("legorl-rank train "), [FILES]);
        assert_eq!(at("legorl-rank train run.env --site "), [FILES]);
        assert_eq!(at("legorl-rank completion z"), ["zsh"]);
        assert!(at("legorl-rank explain topo").contains(&"topology".to_owned()));
        assert!(!at("legorl-rank ").contains(&"complete".to_owned()), "hidden");
    }

    #[test]
    fn variables_and_their_values_come_from_the_table() {
        assert_eq!(
            at("legorl-rank train run.env --set TRAIN_MINI"),
            ["TRAIN_MINI_BSZ="]
        );
        assert_eq!(at("legorl-rank run.env --set BACKEND=d"), ["BACKEND=docker"]);
        assert_eq!(
            at("legorl-rank --set USE_KL_LOSS="),
            ["USE_KL_LOSS=True", "USE_KL_LOSS=False"]
        );
        assert_eq!(
            at("legorl-rank config show x.env --set ").len(),
            variables::all().count()
        );
        assert!(at("legorl-rank run.env --set NOTHING=").is_empty());
    }
}
