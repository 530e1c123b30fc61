//! Files that people name: opened only if they are files.
//!
//! A named pipe in a file's place would hold its reader until somebody writes into it, and a check that should
//! take milliseconds would never answer. Devices are refused for the same reason.

use std::{
    fs::{self, File, FileType, OpenOptions},
    io::{self, Read},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::Path,
};

/// Opens a regular file for reading. Anything else is an error of kind [`InvalidInput`](io::ErrorKind::InvalidInput)
/// that says what is there; it is not opened.
pub fn open(path: &Path) -> io::Result<File> {
    check(path)?;
    // The file may have been replaced since: so opened, even a named pipe does not wait.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    regular(file.metadata()?.file_type())?;
    Ok(file)
}

/// Proves that `path` is a regular file, for libraries that open it themselves. Errors are those of [`open`].
pub fn check(path: &Path) -> io::Result<()> {
    regular(fs::metadata(path)?.file_type())
}

/// Content of a regular file. Errors are those of [`open`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Text of a regular file. Errors are those of [`open`], and [`InvalidData`](io::ErrorKind::InvalidData) where it
/// is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

fn regular(kind: FileType) -> io::Result<()> {
    let what = match kind {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a named pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("it is {what}, not a regular file"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::{ffi::OsStrExt, fs::symlink};

    /// A named pipe, which nobody writes into.
    fn fifo(path: &Path) {
        let name = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: `name` is a NUL-terminated string that lives through the call.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    }

    #[test]
    fn what_is_no_file_is_named_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "ä\n").unwrap();
        symlink(at("file"), at("link")).unwrap();
        fs::write(at("bytes"), [0xff]).unwrap();
        fifo(&at("pipe"));
        symlink(at("pipe"), at("link-to-pipe")).unwrap();
        assert_eq!(read_text(&at("file")).unwrap(), "ä\n");
        assert_eq!(read(&at("link")).unwrap(), "ä\n".as_bytes());
        for name in ["pipe", "link-to-pipe"] {
            for error in [check(&at(name)).unwrap_err(), read(&at(name)).unwrap_err()] {
                assert_eq!(error.to_string(), "it is a named pipe, not a regular file");
            }
        }
        let kind = |path: &Path| read_text(path).unwrap_err().kind();
        assert_eq!(kind(dir.path()), io::ErrorKind::InvalidInput);
        assert_eq!(kind(Path::new("/dev/null")), io::ErrorKind::InvalidInput);
        assert_eq!(kind(&at("bytes")), io::ErrorKind::InvalidData);
        assert_eq!(kind(&at("absent")), io::ErrorKind::NotFound);
    }
}
