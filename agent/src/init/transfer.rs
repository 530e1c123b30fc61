//! Files into and out of the sandbox. Both run inside, so a link in a path never leads out of it.

use super::Host;
use legorl_agent::protocol::{Reply, Request, CHUNK};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{symlink, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;

/// Uploads in progress by request id.
#[derive(Default)]
pub struct Uploads(HashMap<u32, Upload>);

struct Upload {
    root: PathBuf,
    file: Option<(PathBuf, File)>,
    /// It was answered with a failure; what still comes is dropped.
    failed: bool,
}

impl Uploads {
    /// A message of an upload.
    pub fn message(&mut self, host: &Host, id: u32, message: Request) -> io::Result<()> {
        if let Request::Upload { path } = &message {
            let root = PathBuf::from(path);
            let upload = Upload {
                root,
                file: None,
                failed: false,
            };
            self.0.insert(id, upload);
            return Ok(());
        }
        let Some(upload) = self.0.get_mut(&id) else {
            return Err(io::Error::other(format!("{message:?} without an upload")));
        };
        if matches!(message, Request::End) {
            let failed = upload.failed;
            self.0.remove(&id);
            return if failed {
                Ok(())
            } else {
                host.reply(id, &Reply::Done)
            };
        }
        if upload.failed {
            return Ok(());
        }
        let outcome = upload.entry(&message);
        upload.answer(host, id, outcome)
    }

    /// Content of the file that was begun last.
    pub fn bytes(&mut self, host: &Host, id: u32, bytes: &[u8]) -> io::Result<()> {
        let Some(upload) = self.0.get_mut(&id).filter(|u| !u.failed) else {
            return Ok(());
        };
        let outcome = match &mut upload.file {
            Some((path, file)) => file
                .write_all(bytes)
                .map_err(|e| format!("write `{}`: {e}", path.display())),
            None => Err("bytes without a file".to_string()),
        };
        upload.answer(host, id, outcome)
    }
}

impl Upload {
    fn answer(&mut self, host: &Host, id: u32, outcome: Result<(), String>) -> io::Result<()> {
        let Err(problem) = outcome else { return Ok(()) };
        self.failed = true;
        self.file = None;
        host.reply(id, &Reply::Failed { problem })
    }

    fn entry(&mut self, message: &Request) -> Result<(), String> {
        self.file = None;
        let relative = match message {
            Request::Dir { path, .. } | Request::File { path, .. } | Request::Link { path, .. } => path,
            other => return Err(format!("{other:?} inside an upload")),
        };
        let path = if relative.is_empty() {
            self.root.clone()
        } else {
            self.root.join(relative)
        };
        let failed = |e: io::Error| format!("write `{}`: {e}", path.display());
        match message {
            Request::Dir { mode, .. } => make_dir(&path, *mode).map_err(failed),
            Request::File { mode, .. } => {
                let file = make_file(&path, *mode).map_err(failed)?;
                self.file = Some((path, file));
                Ok(())
            }
            Request::Link { target, .. } => make_room(&path)
                .and_then(|()| symlink(target, &path))
                .map_err(failed),
            _ => Ok(()),
        }
    }
}

fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        // A link that the agent may have put there must not say where the host's files go.
        Ok(meta) if !meta.is_dir() => {
            fs::remove_file(path)?;
            fs::create_dir(path)?;
        }
        Ok(_) => return Ok(()),
        Err(_) => fs::create_dir_all(path)?,
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777))
}

fn make_file(path: &Path, mode: u32) -> io::Result<File> {
    make_room(path)?;
    let file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(mode & 0o7777))?;
    Ok(file)
}

/// Parents exist and nothing is at `path`.
fn make_room(path: &Path) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => Err(io::Error::new(
            io::ErrorKind::IsADirectory,
            "a folder is in its place",
        )),
        Ok(_) => fs::remove_file(path),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

/// Sends a file or folder from a thread of its own.
pub fn download(id: u32, path: String, host: &Host) -> io::Result<()> {
    let own_host = host.clone();
    let send = move || {
        let reply = match send_tree(id, Path::new(&path), &own_host) {
            Ok(()) => Reply::Done,
            Err(problem) => Reply::Failed { problem },
        };
        // The control thread notices a host that is gone.
        let _ = own_host.reply(id, &reply);
    };
    match thread::Builder::new().spawn(send) {
        Ok(_) => Ok(()),
        Err(e) => host.reply(
            id,
            &Reply::Failed {
                problem: format!("no thread: {e}"),
            },
        ),
    }
}

fn send_tree(id: u32, root: &Path, host: &Host) -> Result<(), String> {
    let meta = fs::metadata(root).map_err(|e| format!("read `{}`: {e}", root.display()))?;
    if !meta.is_dir() {
        return send_file(id, root, String::new(), host);
    }
    let mut pending = vec![(root.to_path_buf(), String::new())];
    while let Some((folder, relative)) = pending.pop() {
        let failed = |e: io::Error| format!("read `{}`: {e}", folder.display());
        let dir = Reply::Dir {
            path: relative.clone(),
        };
        host.reply(id, &dir).map_err(failed)?;
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let below = if relative.is_empty() {
                name
            } else {
                format!("{relative}/{name}")
            };
            let kind = entry.file_type().map_err(failed)?;
            if kind.is_dir() {
                pending.push((entry.path(), below));
            } else if kind.is_file() {
                send_file(id, &entry.path(), below, host)?;
            }
        }
    }
    Ok(())
}

fn send_file(id: u32, path: &Path, relative: String, host: &Host) -> Result<(), String> {
    let failed = |e: io::Error| format!("read `{}`: {e}", path.display());
    // Without O_NONBLOCK a pipe that was put in the file's place would block for ever.
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path)
        .map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(format!("read `{}`: not a regular file", path.display()));
    }
    host.reply(id, &Reply::File { path: relative }).map_err(failed)?;
    let mut chunk = vec![0; CHUNK];
    loop {
        let n = file.read(&mut chunk).map_err(failed)?;
        if n == 0 {
            return Ok(());
        }
        host.raw(id, &chunk[..n]).map_err(failed)?;
    }
}
