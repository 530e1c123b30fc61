#!/bin/bash
set -e
cd /app
mkdir birch robin
