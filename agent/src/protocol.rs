//! The conversation between a host and the first process of a sandbox, over one stream socket.
//!
//! A frame is a header of 9 bytes and a payload:
//!
//! | bytes | meaning |
//! |---|---|
//! | 0..4 | length of the payload, little-endian, at most [`MAX_PAYLOAD`] |
//! | 4 | [`Kind`]: 0 = JSON message, 1 = raw bytes |
//! | 5..9 | request id, little-endian; chosen by the host, 0 = the sandbox itself |
//! | 9.. | payload |
//!
//! The host sends [`Request`]s and the helper answers with [`Reply`]s of the same id:
//!
//! - `Setup` → `Ready`, once, first.
//! - `Exec` → any number of raw frames (output, up to the cap), then `Exit`, or `Failed`.
//! - `Upload`, then `Dir`, `Link`, or `File` followed by raw frames, …, `End` → `Done` or `Failed`.
//! - `Download` → `Dir`, or `File` followed by raw frames, …, then `Done` or `Failed`.
//! - `Kill` ends the command of that id; its `Exit` still follows.
//!
//! When the host's end closes, the helper exits, and the kernel kills the whole sandbox with it.

use serde::{de::DeserializeOwned, Deserialize, Serialize};
use std::io::{self, Read, Write};

/// Port on the sandbox's loopback device that leads to the proxy.
pub const PROXY_PORT: u16 = 4141;
/// Where the host binds the helper inside a sandbox.
pub const HELPER_PATH: &str = "/run/legorl/agent";
/// Where the host binds the proxy's socket inside a sandbox.
pub const PROXY_SOCKET_PATH: &str = "/run/legorl/proxy.sock";
/// Largest payload of one frame.
pub const MAX_PAYLOAD: usize = 8 << 20;
/// Size of the raw frames that both sides send.
pub const CHUNK: usize = 64 << 10;
/// Bytes of a command's output that [`Reply::Exit`] carries at most.
pub const TAIL_BYTES: usize = 64 << 10;
/// Length of a frame's header.
pub const HEADER: usize = 9;

/// What a payload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A [`Request`] or [`Reply`] as JSON.
    Message,
    /// Bytes of a file or of a command's output.
    Raw,
}

/// Limits and surroundings of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// The proxy's socket is bound at [`PROXY_SOCKET_PATH`] and is to be reached at [`PROXY_PORT`].
    pub forward_proxy: bool,
    /// Lay a writable overlay, upper side in `/layer`, over `/lower` and make it the root.
    pub overlay: bool,
    /// Folders and files of the first root to bind into the overlay, relative to `/`.
    pub carried: Vec<String>,
    /// Further places of the first root to bind into the overlay: where they are, absolute path they get.
    pub mounts: Vec<(String, String)>,
    /// Watch the summed resident memory of all processes, bytes. Absent when a control group does it.
    pub watch_memory_bytes: Option<u64>,
    /// Processes and threads that may exist at once, whoever enforces it.
    pub pids_limit: Option<u32>,
    /// Watch the number of processes and threads. Absent when a control group does it.
    pub watch_pids: Option<u32>,
    /// Set `RLIMIT_NPROC` of commands as well (only useful where it counts this sandbox alone).
    pub rlimit_nproc: Option<u32>,
    /// `RLIMIT_CPU` of commands, seconds of processor time of one process.
    pub rlimit_cpu_secs: Option<u64>,
    /// `RLIMIT_FSIZE` of commands, bytes.
    pub rlimit_fsize_bytes: Option<u64>,
    /// The sandbox ends by itself after this time.
    pub wall_limit_ms: u64,
}

/// From the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Request {
    /// The first message.
    Setup(Setup),
    /// Run a command.
    Exec {
        /// Program and arguments.
        argv: Vec<String>,
        /// The whole environment.
        env: Vec<(String, String)>,
        /// Working directory.
        cwd: String,
        /// Kill the command and its descendants after this time.
        timeout_ms: Option<u64>,
        /// Bytes of output to send on; the rest is counted only.
        forward_bytes: u64,
    },
    /// End the command of this id with SIGKILL.
    Kill,
    /// Begin writing below this absolute path.
    Upload {
        /// File or folder inside.
        path: String,
    },
    /// A folder, `path` relative to the upload; empty for the upload's own path.
    Dir {
        /// Relative path.
        path: String,
        /// Permission bits.
        mode: u32,
    },
    /// A file; its bytes follow as raw frames, up to the next message.
    File {
        /// Relative path; empty when the upload is one file.
        path: String,
        /// Permission bits.
        mode: u32,
    },
    /// A symbolic link.
    Link {
        /// Relative path.
        path: String,
        /// Text of the link.
        target: String,
    },
    /// The upload is complete.
    End,
    /// Send this file or folder.
    Download {
        /// Absolute path inside.
        path: String,
    },
}

/// From the helper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Reply {
    /// The sandbox takes requests.
    Ready,
    /// A command ended.
    Exit {
        /// Exit status.
        code: Option<i32>,
        /// Signal.
        signal: Option<i32>,
        /// The time limit ended it.
        timed_out: bool,
        /// The watchdog killed a process for memory while it ran.
        oom_killed: bool,
        /// The watchdog ended it for the number of processes.
        pids_limit_hit: bool,
        /// End of the output, at most [`TAIL_BYTES`], lossy UTF-8.
        tail: String,
        /// Bytes of output in all.
        output_bytes: u64,
    },
    /// A folder of a download, relative.
    Dir {
        /// Relative path.
        path: String,
    },
    /// A file of a download; its bytes follow as raw frames, up to the next message.
    File {
        /// Relative path; empty when the download is one file.
        path: String,
    },
    /// The request is complete.
    Done,
    /// The request failed.
    Failed {
        /// Why, with the path inside.
        problem: String,
    },
    /// The sandbox ends itself now (id 0).
    Ending {
        /// Why.
        reason: String,
    },
}

/// The header of a frame.
pub fn encode_header(kind: Kind, id: u32, payload_len: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&(payload_len as u32).to_le_bytes());
    header[4] = kind as u8;
    header[5..].copy_from_slice(&id.to_le_bytes());
    header
}

/// Kind, id and payload length of a header.
pub fn decode_header(header: &[u8; HEADER]) -> io::Result<(Kind, u32, usize)> {
    let [l0, l1, l2, l3, kind, i0, i1, i2, i3] = *header;
    let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    let kind = match kind {
        0 => Kind::Message,
        1 => Kind::Raw,
        other => return Err(invalid(format!("frame of unknown kind {other}"))),
    };
    if len > MAX_PAYLOAD {
        return Err(invalid(format!(
            "frame of {len} bytes, the limit is {MAX_PAYLOAD}"
        )));
    }
    Ok((kind, u32::from_le_bytes([i0, i1, i2, i3]), len))
}

/// A message as the bytes of one frame.
pub fn encode_message<M: Serialize>(id: u32, message: &M) -> io::Result<Vec<u8>> {
    let payload = serde_json::to_vec(message)?;
    if payload.len() > MAX_PAYLOAD {
        return Err(invalid(format!(
            "message of {} bytes, the limit is {MAX_PAYLOAD}",
            payload.len()
        )));
    }
    let mut frame = encode_header(Kind::Message, id, payload.len()).to_vec();
    frame.extend_from_slice(&payload);
    Ok(frame)
}

/// Bytes as one frame.
pub fn encode_raw(id: u32, bytes: &[u8]) -> Vec<u8> {
    let mut frame = encode_header(Kind::Raw, id, bytes.len()).to_vec();
    frame.extend_from_slice(bytes);
    frame
}

/// The message of a payload.
pub fn decode_message<M: DeserializeOwned>(payload: &[u8]) -> io::Result<M> {
    Ok(serde_json::from_slice(payload)?)
}

/// Writes one frame in one call.
pub fn write_frame(to: &mut impl Write, frame: &[u8]) -> io::Result<()> {
    to.write_all(frame)
}

/// Reads one frame; `None` at the end of the stream.
pub fn read_frame(from: &mut impl Read) -> io::Result<Option<(Kind, u32, Vec<u8>)>> {
    let mut header = [0; HEADER];
    let mut filled = 0;
    while filled < HEADER {
        match from.read(&mut header[filled..]) {
            Ok(0) if filled == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let (kind, id, len) = decode_header(&header)?;
    let mut payload = vec![0; len];
    from.read_exact(&mut payload)?;
    Ok(Some((kind, id, payload)))
}

fn invalid(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire_and_garbage_is_refused() {
        let request = Request::Exec {
            argv: vec!["echo".into(), "ä\n".into()],
            env: vec![("A".into(), "b=c".into())],
            cwd: "/".into(),
            timeout_ms: None,
            forward_bytes: 7,
        };
        let mut wire = encode_message(3, &request).unwrap();
        wire.extend(encode_raw(4, b"xyz"));
        let mut from = wire.as_slice();
        let (kind, id, payload) = read_frame(&mut from).unwrap().unwrap();
        assert_eq!((kind, id), (Kind::Message, 3));
        assert_eq!(decode_message::<Request>(&payload).unwrap(), request);
        assert_eq!(
            read_frame(&mut from).unwrap().unwrap(),
            (Kind::Raw, 4, b"xyz".to_vec())
        );
        assert!(read_frame(&mut from).unwrap().is_none());
        // A torn header, an unknown kind and an absurd length are errors, not ends.
        assert!(read_frame(&mut &wire[..5]).is_err());
        let mut bad = wire.clone();
        bad[4] = 9;
        assert!(read_frame(&mut bad.as_slice()).is_err());
        bad = wire;
        bad[3] = 0xff;
        assert!(read_frame(&mut bad.as_slice()).is_err());
    }
}
