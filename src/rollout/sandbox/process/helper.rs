//! Finds the static helper `legorl-agent`.

use crate::rollout::sandbox::SandboxError;
use std::path::{Path, PathBuf};

/// Names the helper in the process environment.
pub const HELPER_VARIABLE: &str = "LEGORL_AGENT";
const NAME: &str = "legorl-agent";
const FIX: &str = "run `make agent`, or set LEGORL_AGENT to the static helper";

/// The helper: `LEGORL_AGENT`, else `legorl-agent` beside the running executable, else where `make agent`
/// puts it below the same target folder. Dynamically linked files are passed over, since they cannot run
/// in every root.
pub fn find() -> Result<PathBuf, SandboxError> {
    if let Some(path) = std::env::var_os(HELPER_VARIABLE) {
        return resolve(Some(Path::new(&path)));
    }
    let executable = std::env::current_exe()
        .and_then(|p| p.canonicalize())
        .map_err(|e| SandboxError::io("find the running executable", "/proc/self/exe", e))?;
    let mut tried = Vec::new();
    for candidate in candidates(&executable) {
        match link_kind(&candidate) {
            Ok(Link::Static) => return Ok(candidate),
            Ok(Link::Dynamic) => tried.push(format!("{} (dynamically linked)", candidate.display())),
            Ok(Link::NotElf) => tried.push(format!("{} (not a program)", candidate.display())),
            Err(_) => tried.push(candidate.display().to_string()),
        }
    }
    Err(SandboxError::Unavailable {
        what: format!("the sandbox helper `{NAME}`"),
        detail: format!("not found; looked at {}", tried.join(", ")),
        fix: FIX.into(),
    })
}

/// The given helper when it is a static program, else what [`find`] finds.
pub fn resolve(given: Option<&Path>) -> Result<PathBuf, SandboxError> {
    let Some(path) = given else { return find() };
    let refuse = |detail: String| SandboxError::Unavailable {
        what: format!("the sandbox helper `{}`", path.display()),
        detail,
        fix: FIX.into(),
    };
    match link_kind(path) {
        Ok(Link::Static) => path.canonicalize().map_err(|e| refuse(e.to_string())),
        Ok(Link::Dynamic) => Err(refuse("it is dynamically linked".into())),
        Ok(Link::NotElf) => Err(refuse("it is not a 64-bit ELF program".into())),
        Err(e) => Err(refuse(e.to_string())),
    }
}

/// Beside the executable; then, for `target/<profile>/[deps/]x`, the folders of the static target.
fn candidates(executable: &Path) -> Vec<PathBuf> {
    let mut list = Vec::new();
    for folder in executable.ancestors().skip(1).take(3) {
        list.push(folder.join(NAME));
        for profile in ["release", "debug"] {
            list.push(
                folder
                    .join(format!("{}-unknown-linux-gnu", std::env::consts::ARCH))
                    .join(profile)
                    .join(NAME),
            );
        }
    }
    list
}

#[derive(Debug, PartialEq)]
enum Link {
    Static,
    Dynamic,
    NotElf,
}

/// A program is dynamic when it names an interpreter: a program header of type PT_INTERP (3).
fn link_kind(path: &Path) -> std::io::Result<Link> {
    use std::io::Read;
    let mut head = Vec::new();
    std::fs::File::open(path)?.take(4096).read_to_end(&mut head)?;
    let u16_at = |at: usize| {
        head.get(at..at + 2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]) as usize)
    };
    let is_elf64 = head.starts_with(b"\x7fELF\x02\x01");
    let (Some(size), Some(count)) = (u16_at(54), u16_at(56)) else {
        return Ok(Link::NotElf);
    };
    if !is_elf64 {
        return Ok(Link::NotElf);
    }
    // e_phoff is 64 in every file that a linker writes: the table follows the header.
    let interpreter =
        (0..count).any(|i| head.get(64 + i * size..64 + i * size + 4) == Some(&3u32.to_le_bytes()[..]));
    Ok(if interpreter { Link::Dynamic } else { Link::Static })
}

/// For tests: the helper of this source tree, built when it is not up to date.
#[cfg(test)]
pub(crate) fn for_tests() -> PathBuf {
    if let Some(path) = std::env::var_os(HELPER_VARIABLE) {
        return path.into();
    }
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let built = std::process::Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env(
            "RUSTFLAGS",
            "-C target-feature=+crt-static -C relocation-model=static -C strip=symbols",
        )
        .args([
            "build",
            "--quiet",
            "--release",
            "-p",
            "legorl-agent",
            "--target",
            &triple,
        ])
        .status();
    assert!(built.is_ok_and(|s| s.success()), "the helper cannot be built");
    find().expect("the helper was built just now")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_programs_and_scripts_are_refused_by_name() {
        let this = std::env::current_exe().unwrap();
        assert_eq!(link_kind(&this).unwrap(), Link::Dynamic);
        let text = resolve(Some(&this)).unwrap_err().to_string();
        assert!(
            text.contains("dynamically linked") && text.contains("make agent"),
            "{text}"
        );
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("x");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        assert_eq!(link_kind(&script).unwrap(), Link::NotElf);
        let missing = resolve(Some(Path::new("/no/such/helper")))
            .unwrap_err()
            .to_string();
        assert!(missing.contains("/no/such/helper"), "{missing}");
    }
}
