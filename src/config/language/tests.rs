//! Tests of the language: what it understands, what it refuses, and that no input breaks it.

use super::*;
use proptest::prelude::*;
use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

#[derive(Default)]
pub(super) struct Variables {
    set: BTreeMap<String, String>,
    arrays: BTreeMap<String, Vec<String>>,
    environment: BTreeMap<String, String>,
}

impl Names for Variables {
    fn configured(&self, name: &str) -> Option<String> {
        self.set.get(name).cloned()
    }
    fn fallback(&mut self, name: &str, _: &Location) -> Option<String> {
        self.environment.get(name).cloned()
    }
    fn environment(&mut self, name: &str) -> Option<String> {
        self.environment.get(name).cloned()
    }
    fn is_array(&self, name: &str) -> bool {
        self.arrays.contains_key(name)
    }
    fn set(&mut self, name: &str, setting: Setting, _: &Location) -> Result<(), LanguageError> {
        match setting {
            Setting::Text(text) => {
                self.set.insert(name.to_owned(), text);
            }
            Setting::Array(items) => {
                self.arrays
                    .insert(name.to_owned(), items.into_iter().map(|(_, item)| item).collect());
            }
        }
        Ok(())
    }
}

pub(super) fn evaluate_bytes(bytes: &[u8]) -> Result<Variables, LanguageError> {
    let mut variables = Variables::default();
    variables.environment.insert("HOME".into(), "/home/u".into());
    let file = parse(Arc::new("run.env".into()), bytes)?;
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    Evaluation::new(&mut variables, now).run(&file)?;
    Ok(variables)
}

fn evaluate(text: &str) -> Variables {
    evaluate_bytes(text.as_bytes()).unwrap_or_else(|error| panic!("{text:?} must be understood: {error}"))
}

/// The value of X.
fn x(text: &str) -> String {
    evaluate(text)
        .set
        .remove("X")
        .unwrap_or_else(|| panic!("{text:?} must set X"))
}

fn refuse(text: &str) -> LanguageError {
    match evaluate_bytes(text.as_bytes()) {
        Ok(variables) => panic!("{text:?} must be refused, and gave {:?}", variables.set),
        Err(error) => error,
    }
}

/// What bash makes of the same text.
fn bash(text: &str) -> String {
    let output = std::process::Command::new("bash")
        .args(["--norc", "-c", &format!("{text}\nprintf %s \"$X\"")])
        .env_clear()
        .env("HOME", "/home/u")
        .output()
        .expect("bash is the reference of this test");
    assert!(output.status.success(), "bash refuses {text:?}");
    String::from_utf8(output.stdout).expect("UTF-8 in, UTF-8 out")
}

#[test]
fn quotes_escapes_and_comments() {
    for (text, value) in [
        ("X=plain", "plain"),
        ("X=", ""),
        ("X=\"\"", ""),
        ("X='single $HOME \"x\"'", "single $HOME \"x\""),
        (
            "X=\"double # not a comment\"  # comment",
            "double # not a comment",
        ),
        ("X=a#b", "a#b"),
        ("X=a # b", "a"),
        ("X=a\\ b", "a b"),
        ("X=\"a\\\"b\\\\c\\$d\\e\"", "a\"b\\c$d\\e"),
        ("X='a'\"b\"c", "abc"),
        ("  X=indented", "indented"),
        ("export X=exported", "exported"),
        ("export Y=1 X=2", "2"),
        ("X=one; Y=two", "one"),
        ("X=con\\\ntinued", "continued"),
        ("X=\"con\\\ntinued\"", "continued"),
        ("X='two\nlines'", "two\nlines"),
        ("Y='[\n  1\n]'\nX=\"a\nb\" # c", "a\nb"),
        ("\u{feff}X=bom", "bom"),
        ("X=crlf\r\nY=2\r\n", "crlf"),
        ("X=\"crlf\r\nin quotes\"\r\n", "crlf\nin quotes"),
        ("X=$", "$"),
        ("X=5$", "5$"),
        ("X={a,b}", "{a,b}"),
        ("X='[{\"host_path\":\"/a\"}]'", "[{\"host_path\":\"/a\"}]"),
        ("X=ünïcode", "ünïcode"),
    ] {
        assert_eq!(x(text), value, "{text:?}");
        let for_bash = text.replace(['\r', '\u{feff}'], "");
        assert_eq!(bash(&for_bash), value, "{text:?}");
    }
}

#[test]
fn expansions() {
    for (text, value) in [
        ("A=1\nX=${A}2", "12"),
        ("A=1\nX=$A/2", "1/2"),
        ("X=$HOME/.kube", "/home/u/.kube"),
        ("X=${NO:-default}", "default"),
        ("X=\"${NO:-two words}\"", "two words"),
        ("A=\nX=${A:-empty}", "empty"),
        ("A=\nX=${A-empty}", ""),
        ("X=${HOME:-d}", "/home/u"),
        ("A=1\nX=${A:+yes}", "yes"),
        ("X=${A:+yes}", ""),
        ("X=${A:-${B:-nested}}", "nested"),
        (": \"${X:=set}\"", "set"),
        ("X=kept\n: \"${X:=set}\"", "kept"),
        ("X=\n: \"${X:=set}\"", "set"),
        ("X=\n: \"${X=set}\"", ""),
        (": \"${X:=['console', 'wandb']}\"", "['console', 'wandb']"),
        (": \"${X:={a: 0, b: 1\\}}\"", "{a: 0, b: 1}"),
        (": \"${X:={a: ${Y:-7}\\}}\"", "{a: 7}"),
        (": \"${Y:?needed}\"\nX=1", "1"),
        ("X=${Y:?needed}", "y"),
        ("X=\"${NO:-\"inner quotes\"}\"", "inner quotes"),
        ("X=$(date -u +%Y%m%d-%H%M%S)", "20231114-221320"),
        ("X=run-$(date -u '+%Y %j')", "run-2023 318"),
        ("X=$(date --utc +%s)", "1700000000"),
    ] {
        let text = if text.contains("needed") {
            format!("Y=y\n{text}")
        } else {
            text.to_owned()
        };
        assert_eq!(x(&text), value, "{text:?}");
        if !text.contains("$(date") {
            assert_eq!(bash(&text), value, "{text:?}");
        }
    }
}

#[test]
fn arithmetic() {
    for (expression, value) in [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("A / B", "3"),
        ("$A % ${B}", "1"),
        ("-7 / 2", "-3"),
        ("2 ** 3 ** 2", "512"),
        ("-2 ** 2", "4"),
        ("10 - 3 - 2", "5"),
        ("A > B && B > 0", "1"),
        ("A == 10 ? 100 : 200", "100"),
        ("!A", "0"),
        ("0x10", "16"),
        ("${NO:-5} + 1", "6"),
        ("B != 0 || 1 / 0", "1"),
        ("1 << 0 == 0", ""),
    ] {
        let text = format!("A=10\nB=3\nX=$(({expression}))");
        if value.is_empty() {
            refuse(&text);
        } else {
            assert_eq!(x(&text), value, "{expression}");
            assert_eq!(bash(&text), value, "{expression}");
        }
    }
    // The form of the original's templates.
    assert_eq!(
        x("P=30000\nR=170000\nSP=8\n: \"${X:=$(((P + R) / SP))}\""),
        "25000"
    );
}

#[test]
fn arrays() {
    let variables = evaluate("K=b\nM=(\n  a/one.env   # first\n  \"x/${K}.env\"\n\n  'c d'\n)\nE=()\n");
    assert_eq!(variables.arrays["M"], ["a/one.env", "x/b.env", "c d"]);
    assert!(variables.arrays["E"].is_empty());
}

#[test]
fn what_is_not_a_value_is_refused_with_its_place_and_a_way_out() {
    for (text, line, column, help) in [
        ("X=$(hostname)", 1, 3, "date"),
        ("A=1\nX=`id`", 2, 3, "date"),
        ("X=$(date)", 1, 3, "date +FORMAT"),
        ("X=$(date +%Q)", 1, 3, "%Y"),
        ("X=*.parquet", 1, 3, "quotes"),
        ("X=a | b", 1, 5, "quotes"),
        ("X=a>b", 1, 4, "quotes"),
        ("X=~/m", 1, 3, "${HOME}"),
        ("X = 1", 1, 1, "without blanks"),
        ("if [ -z x ]; then", 1, 1, "template module"),
        ("source other.env", 1, 1, "TEMPLATE_MODULES"),
        (". other.env", 1, 1, "TEMPLATE_MODULES"),
        ("for i in 1 2; do", 1, 1, "write every value"),
        ("set -euo pipefail", 1, 1, "remove this line"),
        ("unset X", 1, 1, "remove this line"),
        ("declare -x X=1", 1, 1, "NAME=value"),
        ("rm -rf /", 1, 1, "NAME=value"),
        ("X+=more", 1, 2, "whole value"),
        ("X=${Y}", 1, 3, "${Y:-}"),
        ("X=${Y:?set it}", 1, 3, "--set Y"),
        ("X=${Y%.env}", 1, 6, "value itself"),
        ("X=${Y/a/b}", 1, 6, "value itself"),
        ("X=${#Y}", 1, 3, "${NAME}"),
        ("X=${Y[0]}", 1, 6, "value itself"),
        ("X=$1", 1, 3, "\\$"),
        ("X=$'a'", 1, 3, "plain quotes"),
        ("X='open", 1, 3, "'"),
        ("X=\"open\nY=1", 1, 3, "\""),
        ("X=${A:-open", 1, 3, "}"),
        ("X=$((1 + ))", 1, 10, "whole numbers"),
        ("X=$((1 / 0))", 1, 8, "variable on the right"),
        ("A=1.5\nX=$((A * 2))", 2, 6, "whole numbers"),
        ("X=$((9223372036854775807 + 1))", 1, 26, "smaller"),
        ("X=$((08))", 1, 6, "zero"),
        ("M=( a b", 1, 3, ")"),
        ("M=( {a,b} )", 1, 5, "every item"),
        ("M=( *.env )", 1, 5, "quotes"),
        ("export NOT_SET", 1, 8, "export NOT_SET=value"),
        ("X=a b", 1, 5, "quotes"),
        ("X=“a”", 1, 3, "plain"),
        ("X=a\u{a0}b", 1, 4, "ordinary blanks"),
        ("MAX-PROMPT=1", 1, 1, "letters"),
        ("2X=1", 1, 1, "letters"),
        ("X=$(cat f | wc -l)", 1, 3, "$(date +FORMAT)"),
        ("X=${Y:-$(nproc)}", 1, 8, "$(date +FORMAT)"),
        ("A=1\nX=\"open\nY=\"1\"\nZ='2'\n", 2, 3, "own line"),
        ("A=1\nX='open\nY='1'\nZ=\"2\"\n", 2, 3, "own line"),
        ("M=(\n  \"a\n  \"b\"\n)\nX=1\n", 2, 3, "own line"),
        ("A=(1)\nX=$A", 2, 3, "items"),
    ] {
        let error = refuse(text);
        assert_eq!(
            (error.location.line, error.location.column),
            (line, column),
            "{text:?}: {error}"
        );
        assert!(error.help.contains(help), "{text:?}: {error}");
        assert!(error
            .to_string()
            .starts_with(&format!("run.env:{line}:{column}: ")));
    }
}

#[test]
fn bytes_that_are_not_utf8_are_placed() {
    let Err(error) = evaluate_bytes(b"A=1\nX=ab\xff\n") else {
        panic!("invalid UTF-8 must be refused");
    };
    assert_eq!((error.location.line, error.location.column), (2, 5));
}

#[test]
fn nesting_and_growth_end_in_an_error() {
    let deep = format!("X={}{}", "${A:-".repeat(5000), "}".repeat(5000));
    assert!(refuse(&deep).problem.contains("nested"));
    let deep = format!("X=$(({}1{}))", "(".repeat(5000), ")".repeat(5000));
    assert!(refuse(&deep).problem.contains("nested"));
    let deep = format!("X=$(({}1))", "-".repeat(5000));
    assert!(refuse(&deep).problem.contains("nested"));
    // Each value is short enough, and there are many.
    let mut many = format!("A={}\n", "x".repeat(500_000));
    many.push_str(&"B=$A\n: \"${A:+y}\"\n".repeat(1000));
    assert!(refuse(&many).problem.contains("grow beyond"));
    // Work grows with the size of the file, not with its square: otherwise these would not end.
    for text in [
        format!("M=( {}", "{".repeat(1 << 20)),
        "\"".repeat(1 << 20),
        "X=1\n".repeat(1 << 18),
    ] {
        let _ = evaluate_bytes(text.as_bytes());
    }
    let mut doubling = "A=0123456789\n".to_owned();
    for _ in 0..40 {
        doubling.push_str("A=$A$A\n");
    }
    assert!(refuse(&doubling).problem.contains("grows"));
}

/// Nothing under src/config can start a program: the parser cannot execute what it reads.
#[test]
fn no_source_file_of_the_configuration_starts_a_program() {
    fn look(folder: &std::path::Path, seen: &mut usize) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                look(&path, seen);
            } else if name.ends_with(".rs") && !["tests.rs", "fuzz.rs"].contains(&name.as_str()) {
                *seen += 1;
                let text = std::fs::read_to_string(&path).unwrap();
                for word in ["std::process", "Command::new", "libc::", "unsafe"] {
                    assert!(!text.contains(word), "{}: {word}", path.display());
                }
            }
        }
    }
    let mut seen = 0;
    look(
        std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src/config")),
        &mut seen,
    );
    assert!(seen > 20, "the sources were found");
}

proptest! {
    /// Any text comes back through single quotes.
    #[test]
    fn single_quotes_keep_every_text(text in "[^'\r\0]{0,60}") {
        prop_assert_eq!(x(&format!("X='{text}'")), text);
    }
}
