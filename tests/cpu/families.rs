//! `model run` and `model export` on checkpoints of shapes that nobody chose, against transformers.

use crate::support::{bin_dir, long, must, root, skip};
use std::process::Command;

/// Sixty random cases on every long run; `LEGORL_FAMILY_CASES` draws more, `LEGORL_FAMILY_SEED` others.
#[test]
fn random_checkpoints_of_every_family_are_those_of_transformers() {
    let Some(python) = std::env::var_os("LEGORL_TEST_TRANSFORMERS") else {
        return skip(
            "random checkpoints",
            "LEGORL_TEST_TRANSFORMERS is not set (setup/references.sh)",
        );
    };
    if !long() {
        return skip("random checkpoints", "part of `make test-long`");
    }
    let number = |name: &str, default: &str| std::env::var(name).unwrap_or(default.to_owned());
    let text = must(
        Command::new(python)
            .arg(root().join("tests/references/families.py"))
            .arg(bin_dir().join("legorl-rank"))
            .arg(number("LEGORL_FAMILY_CASES", "60"))
            .args(["--seed", &number("LEGORL_FAMILY_SEED", "0")]),
    );
    println!("{text}");
    assert!(text.contains("cases passed, 0 failed"));
}
