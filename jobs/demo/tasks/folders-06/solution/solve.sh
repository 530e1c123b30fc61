#!/bin/bash
set -e
cd /app
mkdir bread robin
