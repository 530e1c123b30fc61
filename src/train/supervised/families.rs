//! The families of demo tasks. One draw of a family is a whole task: what the instruction says, which
//! files lie in `/app`, what must lie there afterwards, the commands that do it, and the slips that a
//! careless agent makes.
//!
//! | Family | Instruction asks for | Needs |
//! |---|---|---|
//! | `write` | a named word in a named file | the instruction |
//! | `rename` | a file under another name | the instruction |
//! | `copy` | a file inside a folder | the instruction |
//! | `delete` | removal of the file that contains a word | the instruction |
//! | `folders` | two named folders | the instruction |
//! | `count` | the number of lines of a file in another file | the instruction |
//! | `lookup` | the value of a key of a settings file in another file | reading a file first |
//! | `follow` | the folder that a note names | reading a file first |
//!
//! Every task holds files that it is not about, and a passing end state is exact: whatever the task did
//! not ask for must be as it was. So the instruction has to be read, and an over-broad command fails.

use super::words::{draw_words, KEYS};
use rand::{seq::SliceRandom, Rng};
use std::collections::BTreeMap;

/// A family of demo tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Write a word into a file.
    Write,
    /// Rename a file.
    Rename,
    /// Copy a file into a folder.
    Copy,
    /// Delete the file that contains a word.
    Delete,
    /// Create two folders.
    Folders,
    /// Write the number of lines of a file.
    Count,
    /// Copy a value out of a settings file.
    Lookup,
    /// Create the folder that a note names.
    Follow,
}

impl Family {
    /// All families in the order of their folders.
    pub const ALL: [Family; 8] = [
        Family::Write,
        Family::Rename,
        Family::Copy,
        Family::Delete,
        Family::Folders,
        Family::Count,
        Family::Lookup,
        Family::Follow,
    ];

    /// The name in folder names and in `[metadata] family`.
    pub fn name(self) -> &'static str {
        match self {
            Family::Write => "write",
            Family::Rename => "rename",
            Family::Copy => "copy",
            Family::Delete => "delete",
            Family::Folders => "folders",
            Family::Count => "count",
            Family::Lookup => "lookup",
            Family::Follow => "follow",
        }
    }
}

/// A command and what the shell prints for it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Step {
    /// The command line.
    pub command: String,
    /// Standard output and error, without the last newline; empty for a silent command.
    pub output: String,
}

impl Step {
    fn new(command: impl Into<String>, output: impl Into<String>) -> Self {
        Self {
            command: command.into(),
            output: output.into(),
        }
    }

    fn silent(command: impl Into<String>) -> Self {
        Self::new(command, "")
    }
}

/// The files of a folder: path below it to content.
pub type Files = BTreeMap<String, String>;

/// One task.
#[derive(Clone, Debug)]
pub struct Draft {
    /// Its family.
    pub family: Family,
    /// The text that the agent gets.
    pub instruction: String,
    /// What lies in `/app` before.
    pub before: Files,
    /// What must lie there afterwards.
    pub after: Files,
    /// Empty folders that must be there afterwards.
    pub new_folders: Vec<String>,
    /// The command that reads what the instruction does not say.
    pub read: Option<Step>,
    /// The command that does it.
    pub act: Step,
    /// Commands that an agent runs instead of `act` when it prints, touches or overdoes.
    pub slips: [Step; 2],
}

impl Draft {
    /// Draws a task of a family.
    pub fn draw<R: Rng>(family: Family, rng: &mut R) -> Draft {
        match family {
            Family::Write => write(rng),
            Family::Rename => rename(rng),
            Family::Copy => copy(rng),
            Family::Delete => delete(rng),
            Family::Folders => folders(rng),
            Family::Count => count(rng),
            Family::Lookup => lookup(rng),
            Family::Follow => follow(rng),
        }
    }

    /// The commands of the solution, in order.
    pub fn solution(&self) -> Vec<&str> {
        self.read
            .iter()
            .chain([&self.act])
            .map(|s| s.command.as_str())
            .collect()
    }

    /// What `ls` prints in `/app` before the task.
    pub fn listing(&self) -> String {
        let mut names: Vec<&str> = self
            .before
            .keys()
            .map(|path| path.split('/').next().unwrap_or(path))
            .collect();
        names.dedup();
        names.join("\n")
    }
}

/// A file of one line of two words.
fn note(first: &str, second: &str) -> String {
    format!("{first} {second}\n")
}

fn files<const N: usize>(entries: [(String, String); N]) -> Files {
    entries.into_iter().collect()
}

fn write<R: Rng>(rng: &mut R) -> Draft {
    let w = draw_words(rng, 7);
    let (word, file) = (w[0], w[1]);
    let before = files([
        (format!("{}.txt", w[2]), note(w[4], w[5])),
        (format!("{}.txt", w[3]), note(w[6], w[2])),
    ]);
    let mut after = before.clone();
    after.insert(format!("{file}.txt"), format!("{word}\n"));
    Draft {
        family: Family::Write,
        instruction: format!("Write the word {word} into the file {file}.txt."),
        before,
        after,
        new_folders: vec![],
        read: None,
        act: Step::silent(format!("echo {word} > {file}.txt")),
        slips: [
            Step::new(format!("echo {word}"), word),
            Step::silent(format!("touch {file}.txt")),
        ],
    }
}

fn rename<R: Rng>(rng: &mut R) -> Draft {
    let w = draw_words(rng, 8);
    let (old, new) = (w[0], w[1]);
    let content = note(w[2], w[3]);
    let before = files([
        (format!("{old}.txt"), content.clone()),
        (format!("{}.txt", w[4]), note(w[5], w[6])),
        (format!("{}.txt", w[7]), note(w[3], w[5])),
    ]);
    let mut after = before.clone();
    after.remove(&format!("{old}.txt"));
    after.insert(format!("{new}.txt"), content);
    Draft {
        family: Family::Rename,
        instruction: format!("Rename the file {old}.txt to {new}.txt."),
        before,
        after,
        new_folders: vec![],
        read: None,
        act: Step::silent(format!("mv {old}.txt {new}.txt")),
        slips: [
            Step::silent(format!("cp {old}.txt {new}.txt")),
            Step::silent(format!("touch {new}.txt")),
        ],
    }
}

fn copy<R: Rng>(rng: &mut R) -> Draft {
    let w = draw_words(rng, 8);
    let (file, folder) = (w[0], w[1]);
    let content = note(w[2], w[3]);
    let before = files([
        (format!("{file}.txt"), content.clone()),
        (format!("{}.txt", w[4]), note(w[5], w[6])),
        (format!("{folder}/{}.txt", w[7]), note(w[6], w[2])),
    ]);
    let mut after = before.clone();
    after.insert(format!("{folder}/{file}.txt"), content.clone());
    Draft {
        family: Family::Copy,
        instruction: format!("Copy the file {file}.txt into the folder {folder}."),
        before,
        after,
        new_folders: vec![],
        read: None,
        act: Step::silent(format!("cp {file}.txt {folder}")),
        slips: [
            Step::silent(format!("mv {file}.txt {folder}")),
            Step::new(format!("cat {file}.txt"), content.trim_end()),
        ],
    }
}

fn delete<R: Rng>(rng: &mut R) -> Draft {
    let w = draw_words(rng, 8);
    let (word, target) = (w[0], w[1]);
    let before = files([
        (format!("{target}.txt"), note(w[2], word)),
        (format!("{}.txt", w[3]), note(w[4], w[2])),
        (format!("{}.txt", w[5]), note(w[6], w[7])),
    ]);
    let mut after = before.clone();
    after.remove(&format!("{target}.txt"));
    Draft {
        family: Family::Delete,
        instruction: format!("Delete only the file that contains the word {word}."),
        before,
        after,
        new_folders: vec![],
        read: None,
        act: Step::silent(format!("rm $(grep -l {word} *)")),
        slips: [
            Step::new(format!("grep -l {word} *"), format!("{target}.txt")),
            Step::silent("rm *"),
        ],
    }
}

fn folders<R: Rng>(rng: &mut R) -> Draft {
    let w = draw_words(rng, 5);
    let (a, b) = (w[0], w[1]);
    let before = files([(format!("{}.txt", w[2]), note(w[3], w[4]))]);
    Draft {
        family: Family::Folders,
        instruction: format!("Create the folder {a} and the folder {b}."),
        after: before.clone(),
        before,
        new_folders: vec![a.into(), b.into()],
        read: None,
        act: Step::silent(format!("mkdir {a} {b}")),
        slips: [
            Step::silent(format!("mkdir {a}")),
            Step::silent(format!("touch {a} {b}")),
        ],
    }
}

fn count<R: Rng>(rng: &mut R) -> Draft {
    let w = draw_words(rng, 12);
    let (file, target) = (w[0], w[1]);
    let lines = rng.random_range(2..=9);
    let other_lines = if lines > 5 { lines - 3 } else { lines + 2 };
    let text = |n: usize| {
        w[2..2 + n]
            .iter()
            .map(|word| format!("{word}\n"))
            .collect::<String>()
    };
    let before = files([
        (format!("{file}.txt"), text(lines)),
        (format!("{}.txt", w[11]), text(other_lines)),
    ]);
    let mut after = before.clone();
    after.insert(format!("{target}.txt"), format!("{lines}\n"));
    Draft {
        family: Family::Count,
        instruction: format!("Count the lines of {file}.txt and write the number into {target}.txt."),
        before,
        after,
        new_folders: vec![],
        read: None,
        act: Step::silent(format!("wc -l < {file}.txt > {target}.txt")),
        slips: [
            Step::new(format!("wc -l < {file}.txt"), lines.to_string()),
            Step::silent(format!("wc -l {file}.txt > {target}.txt")),
        ],
    }
}

fn lookup<R: Rng>(rng: &mut R) -> Draft {
    let w = draw_words(rng, 9);
    let (file, target) = (w[0], w[1]);
    let mut keys = KEYS;
    keys.shuffle(rng);
    let settings = |values: &[&str]| {
        keys.iter()
            .zip(values)
            .map(|(key, value)| format!("{key} = {value}\n"))
            .collect::<String>()
    };
    let chosen = rng.random_range(0..3);
    let text = settings(&w[2..5]);
    let (key, value) = (keys[chosen], w[2 + chosen]);
    let before = files([
        (format!("{file}.txt"), text),
        (format!("{}.txt", w[5]), settings(&w[6..9])),
    ]);
    let mut after = before.clone();
    after.insert(format!("{target}.txt"), format!("{value}\n"));
    Draft {
        family: Family::Lookup,
        instruction: format!("Find the value of {key} in {file}.txt and write it into {target}.txt."),
        before,
        after,
        new_folders: vec![],
        read: Some(Step::new(
            format!("grep {key} {file}.txt"),
            format!("{key} = {value}"),
        )),
        act: Step::silent(format!("echo {value} > {target}.txt")),
        slips: [
            Step::silent(format!("touch {target}.txt")),
            Step::silent(format!("cat {file}.txt > {target}.txt")),
        ],
    }
}

fn follow<R: Rng>(rng: &mut R) -> Draft {
    let w = draw_words(rng, 5);
    let (file, folder) = (w[0], w[1]);
    let text = |name: &str| format!("Create the folder {name}.\n");
    let before = files([
        (format!("{file}.txt"), text(folder)),
        (format!("{}.txt", w[2]), text(w[3])),
    ]);
    Draft {
        family: Family::Follow,
        instruction: format!("Do what the file {file}.txt says."),
        after: before.clone(),
        before,
        new_folders: vec![folder.into()],
        read: Some(Step::new(format!("cat {file}.txt"), text(folder).trim_end())),
        act: Step::silent(format!("mkdir {folder}")),
        slips: [
            Step::silent(format!("touch {folder}")),
            Step::new(format!("echo {folder}"), folder),
        ],
    }
}
